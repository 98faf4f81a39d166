"""Search and ask with the blocking client: ``python examples/ask.py URL TOKEN_FILE QUESTION``.

For a stack that `penstock up` started, `penstock status` shows the URL, and TOKEN_FILE is .penstock/development-token.
"""

import sys
from pathlib import Path

from penstock.client import AnswerResponse, Client, DeltaEvent, ProblemError

url, token_file, question = sys.argv[1:]

with Client(url, token=Path(token_file)) as client:  # the file is read again when its token is refused
    found = client.search(question, top=3)
    for result in found.results:
        print(f"{result.score:.3f}  {result.citation()}")

    with client.stream_answer(question) as events:
        for event in events:
            match event:
                case DeltaEvent(text=text):  # a piece, as the model writes it
                    print(text, end="", flush=True)
                case AnswerResponse():  # the last event: the same answer, with its citations checked
                    print()
                    for citation in event.citations:
                        print(f"[{citation.n}] {citation.title}, {citation.source_url}")
                    client.feedback("up", answer_id=event.answer_id)

    if found.results:
        story = client.story(found.results[0].document_id)
        print(f"searchable: {story.searchable}, because {story.reason}")

    try:
        client.document("00000000-0000-0000-0000-000000000000")
    except ProblemError as error:  # every error of the service has a kind, which docs/http.md explains
        print(f"{error.kind}: {error.detail}")

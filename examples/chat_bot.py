"""A chat bot that answers from what the author of a message may read:
``python examples/chat_bot.py URL KEY_FILE SIGNING_KEY``.

It reads one message per line on stdin, as a chat program would deliver it: the author's address, a tab, and the text.
The chat program has authenticated the author; the bot says so by signing a token, which is valid for a minute. The
service is set up for it in the file of PENSTOCK_AUTH_KEYS_FILE:

    [chat-bot]
    sha256 = "…"                      # of the key in KEY_FILE
    expires = 2027-06-01
    tenant = "default"

    [chat-bot.acts_for]
    issuer = "chat-bot"
    public_key = '''-----BEGIN PUBLIC KEY-----…'''   # of SIGNING_KEY
    scopes = ["search", "answers"]
    principals = ["*@acme.example"]
"""

import sys
import time
from pathlib import Path

import jwt

from penstock.client import Client, ProblemError

url, key_file, signing_key_file = sys.argv[1:]
signing_key = Path(signing_key_file).read_text()


def vouch_for(person: str) -> str:
    """A token that names the author of a message."""
    now = int(time.time())
    claims = {"iss": "chat-bot", "aud": "penstock", "sub": person, "iat": now, "exp": now + 60}
    return jwt.encode(claims, signing_key, "EdDSA")


with Client(url, token=Path(key_file)) as client:
    for line in sys.stdin:
        author, _, text = line.rstrip("\n").partition("\t")
        # The author comes from the chat program, never from the text of a message.
        person = client.on_behalf_of(lambda author=author: vouch_for(author))
        try:
            answer = person.answer(text)
        except ProblemError as error:
            print(f"{author}: {error.kind}: {error.detail}", flush=True)
            continue
        print(f"{author}: {answer.answer}", flush=True)
        for citation in answer.citations:
            print(f"  [{citation.n}] {citation.title}, {citation.source_url}", flush=True)

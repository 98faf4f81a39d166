"""Penstock in LlamaIndex: ``python examples/ask_llamaindex.py URL TOKEN_FILE QUESTION``.

Needs `pip install 'penstock[llamaindex]'`. Set `Settings.llm` to a real model: the one here repeats the prompt, which
shows what a model would read.
"""

import sys
from pathlib import Path

from llama_index.core import Settings
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine

from penstock.client import Client
from penstock.llamaindex import PenstockReader, PenstockRetriever

url, token_file, question = sys.argv[1:]
Settings.llm = MockLLM()

with Client(url, token=Path(token_file)) as client:
    engine = RetrieverQueryEngine.from_args(PenstockRetriever(client, top=3))
    answer = engine.query(question)
    print(answer)
    for node in answer.source_nodes:
        print(f"{node.score:.3f}  {node.metadata['citation']}")

    for document in PenstockReader(client).load_data(
        query=question, top=1
    ):  # whole documents, for an index of your own
        print(f"{document.metadata['title']}: {len(document.text)} characters")

"""Penstock in a chain of LangChain: ``python examples/ask_langchain.py URL TOKEN_FILE QUESTION``.

Needs `pip install 'penstock[langchain]'`. The chain ends with a prompt, which any chat model can follow.
"""

import asyncio
import sys
from pathlib import Path

from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough

from penstock.client import AsyncClient
from penstock.langchain import PenstockRetriever

PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Answer from these passages, and cite them.\n\n{passages}"), ("human", "{question}")]
)


def numbered(documents: list[Document]) -> str:
    return "\n\n".join(f"[{n}] {d.metadata['citation']}\n{d.page_content}" for n, d in enumerate(documents, 1))


async def main(url: str, token_file: str, question: str) -> None:
    async with AsyncClient(url, token=Path(token_file)) as client:
        retriever = PenstockRetriever(async_client=client, top=3)
        chain = {"passages": retriever | numbered, "question": RunnablePassthrough()} | PROMPT  # | your chat model
        print((await chain.ainvoke(question)).to_string())


asyncio.run(main(*sys.argv[1:]))

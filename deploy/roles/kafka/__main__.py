"""Make the ACLs of Penstock's users what ``acls.json`` says: ``python -m deploy.roles.kafka``.

It logs in as the settings say (``PENSTOCK_KAFKA_…``), as somebody who may alter the cluster's ACLs; topics and groups
get the settings' prefix. What is missing is given, and what these users have besides is taken away where it is ours
(`is_ours`); the rest, another installation's in the same cluster, stays and is named. Nobody else is touched. Repeats
are harmless. `kafka-acls` shows the outcome.

``--passwords FOLDER`` first makes the users themselves, for a Kafka that keeps them (SCRAM-SHA-512): of each that has a
file of its name there, with its password. Repeats are harmless: a changed password takes effect.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Set
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError, for_code
from aiokafka.protocol.admin import CreateAclsRequest, DeleteAclsRequest, DescribeAclsRequest

from deploy.roles.kafka.users import AlterUserScramCredentials, passwords_in
from pipeline.core.errors import Misconfigured, PenstockError, Retryable
from pipeline.kafka.client import refusal, security
from pipeline.runtime.settings import KafkaSettings, load

# Kafka's AclOperation, ResourceType, PatternType and AclPermissionType
OPERATIONS = {"Read": 3, "Write": 4, "Create": 5, "Alter": 7, "Describe": 8, "DescribeConfigs": 10}
KINDS = {"topics": 2, "groups": 3}
NAMES = {number: kind.removesuffix("s") for kind, number in KINDS.items()}
ANY, LITERAL, ALLOW, EVERYWHERE, EVERY = 1, 3, 3, "*", "*"


class Acl(NamedTuple):
    """One right, with Kafka's own numbers."""

    kind: int
    name: str
    pattern: int
    principal: str
    host: str
    operation: int
    permission: int


def desired_acls(prefix: str) -> dict[str, set[Acl]]:
    """principal → its rights."""
    said: Mapping[str, list[dict[str, list[str]]]] = json.loads((files(__package__) / "acls.json").read_text("utf-8"))
    return {f"User:{user}": set(_rights(f"User:{user}", rules, prefix)) for user, rules in said.items()}


def _rights(principal: str, rules: list[dict[str, list[str]]], prefix: str) -> Iterator[Acl]:
    for rule in rules:
        for kind, number in KINDS.items():
            for name in rule.get(kind, ()):
                for operation in rule["may"]:
                    yield Acl(number, prefix + name, LITERAL, principal, EVERYWHERE, OPERATIONS[operation], ALLOW)


def is_ours(acl: Acl, known: Set[str], prefix: str) -> bool:
    """Whether a right that the file does not give may be taken away. The users' names have no prefix: what they may in
    a second Penstock of the same cluster is not this one's to take. Ours is what is named in the file, what begins with
    our prefix, what holds for every name, and what is neither a topic nor a group (no Penstock gives any)."""
    name = acl.name
    return acl.kind not in NAMES or name in known or name == EVERY or (prefix != "" and name.startswith(prefix))


async def apply(kafka: KafkaSettings, passwords: Mapping[str, str]) -> tuple[int, int, list[str]]:
    """Returns how many rights were given, how many taken, and what was left as it is not ours (``user: topic NAME``).
    passwords: user → password, of those to be made.

    Raises Misconfigured, or Retryable when Kafka is away.
    """
    admin: Any = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap, **security(kafka))
    try:
        await admin.start()
        if passwords:
            for _user, code, *_ in (await _ask(admin, AlterUserScramCredentials(dict(passwords)))).results:
                _check(code)
        granted = taken = 0
        left: set[str] = set()
        all_desired = desired_acls(kafka.topic_prefix)
        known = {acl.name for rights in all_desired.values() for acl in rights}
        for principal, rights in all_desired.items():
            held = await _held(admin, principal)
            for acl in sorted(rights - held):
                [[code, _]] = (await _ask(admin, CreateAclsRequest(*acl))).creation_responses
                _check(code)
                granted += 1
            for acl in sorted(held - rights):
                if not is_ours(acl, known, kafka.topic_prefix):
                    left.add(f"{principal.removeprefix('User:')}: {NAMES[acl.kind]} {acl.name}")
                    continue
                [[code, _, _]] = (await _ask(admin, DeleteAclsRequest(*acl))).filter_responses
                _check(code)
                taken += 1
        return granted, taken, sorted(left)
    except (KafkaError, TimeoutError, OSError) as error:
        why = f"Kafka at {kafka.bootstrap}: {type(error).__name__}; check that it is running and reachable"
        raise await refusal(kafka) or Retryable(why, service="kafka") from error
    finally:
        await admin.close()


async def _held(admin: Any, principal: str) -> set[Acl]:
    answer = await _ask(admin, DescribeAclsRequest(ANY, None, ANY, principal, None, ANY, ANY))
    _check(answer.error_code)
    return {
        Acl(kind, name, pattern, *acl) for kind, name, pattern, acls in answer.resources for acl in map(tuple, acls)
    }


async def _ask(admin: Any, request: Any) -> Any:
    """aiokafka has no method of its own for these requests."""
    return await admin._send_to_controller(request)


def _check(code: int) -> None:
    if code:
        what = f"Kafka refuses to tell or change its users or ACLs: {for_code(code).__name__}"
        raise Misconfigured(
            f"{what}; log in (PENSTOCK_KAFKA_SASL_USERNAME) as one of its super.users, and give it an authorizer",
            service="kafka",
        )


def main(
    passwords: Annotated[Path | None, typer.Option(help="A folder with a file for each user: its password.")] = None,
) -> None:
    """Make the rights of Penstock's users in Kafka, and with passwords the users, what acls.json says."""
    try:
        kafka = load().kafka
        users = passwords_in(passwords, {who.removeprefix("User:") for who in desired_acls("")}) if passwords else {}
        granted, taken, left = asyncio.run(apply(kafka, users))
    except PenstockError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    if users:
        typer.echo(f"passwords: {', '.join(sorted(users))}")
    typer.echo(f"{granted} rights given, {taken} taken away" if granted or taken else "Everything is as it should be.")
    for acl in left:
        typer.echo(f"left, for it may be another installation's: {acl}", err=True)


if __name__ == "__main__":
    typer.run(main)

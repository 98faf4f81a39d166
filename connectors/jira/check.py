"""A check that tries each thing that reading needs, and names what is missing."""

from __future__ import annotations

from collections.abc import Sequence

from connectors.jira.access import Directory, Findings, browse_tag, custom_fields
from connectors.jira.client import no_such_project
from connectors.jira.options import JiraOptions
from connectors.jira.site import Projects, Site
from connectors.protocol import Problem, some
from connectors.source import Context, CursorExpired
from connectors.web import Answered, Denied, Forbidden, Missing
from pipeline.core.errors import Misconfigured

MAX_CHECKED_PROJECTS = 20
"""The check reads the permissions of this many projects; a site may have thousands."""


async def check(site: Site, directory: Directory, options: JiraOptions, context: Context) -> Sequence[Problem]:
    """Return one problem for each thing that is missing. Retryable is passed on, because during an outage the check
    cannot say whether anything is missing."""
    problems: list[Problem] = []
    if context.events_url and options.webhook_secret is None:
        problems.append(
            Problem(
                "webhook_secret",
                "events_unsigned",
                "webhook_secret is not set: every event is refused, only polling works",
            )
        )
    try:
        await site.me()
        projects = await site.projects()
    except Denied as error:
        return [*problems, Problem("token", "token", _refused(error, options))]
    except (Missing, Forbidden) as error:
        return [*problems, Problem("base_url", "address", f"{error}: {_address_advice(options)}")]
    except (Answered, Misconfigured) as error:
        return [*problems, Problem("projects", "settings", str(error))]
    if projects.missing:
        problems.append(Problem("projects", "settings", no_such_project(projects.missing)))
    if not projects.by_id:
        message = "the account sees no project at all: let it browse the projects to be read"
        return [*problems, Problem("projects", "no_projects", message)]
    problems += await _check_reading(site, directory, projects)
    return [*problems, *await _check_access(directory, options, projects)]


async def _check_reading(site: Site, directory: Directory, projects: Projects) -> list[Problem]:
    """Read the newest changes, and one issue of the first project."""
    try:
        first = next(iter(projects.by_id.values()))
        extra = custom_fields(await directory.rules(first))
        listing = await site.listing(first, None, extra, full=True, size=1)
        await site.issues([issue.id for issue in listing.issues], extra)
        await site.changed(projects, 5)
    except (Answered, CursorExpired, Forbidden) as error:
        return [Problem("token", "issues", f"issues cannot be read ({error}): give the account Browse Projects")]
    return []


async def _check_access(directory: Directory, options: JiraOptions, projects: Projects) -> list[Problem]:
    findings = Findings()
    tags = [browse_tag(id) for id in list(projects.by_id)[:MAX_CHECKED_PROJECTS]]
    try:
        async for _ in directory.groups(tags, projects.by_id, findings):
            pass
    except (Answered, Misconfigured) as error:
        return [Problem("token", "permission", str(error))]
    problems = [
        Problem(
            "token",
            "permission",
            f"{part}: {reason}; until then it admits nobody. Give the account Administer Jira, or Administer Projects"
            " and Browse users and groups",
        )
        for part, reason in sorted(findings.errors.items())
    ]
    if findings.unread:
        problems.append(
            Problem(
                "projects",
                "nobody",
                f"no person, group, role or product may browse {some(findings.unread)}, so their documents are found"
                " by nobody: grant it in the permission scheme, or exclude the projects",
            )
        )
    if findings.without_address:
        problems.append(
            Problem(
                "principals",
                "addresses_hidden",
                f"Jira does not return the e-mail addresses of {len(findings.without_address)} accounts"
                f" ({some(findings.without_address)}): they are known as account:ID, which matches nobody elsewhere;"
                f" set principals{' or email_domain' if options.flavour == 'data-center' else ''}",
            )
        )
    return problems


def _refused(error: Denied, options: JiraOptions) -> str:
    if options.flavour == "data-center":
        return f"the personal access token was refused ({error.status}): check that it is complete and has not expired"
    return (
        f"the token was refused ({error.status}), or lacks the scope read:jira-user or read:jira-work: check that email"
        " and token belong to the same account, and that base_url fits the kind of token"
    )


def _address_advice(options: JiraOptions) -> str:
    return f"is base_url {options.base_url} the address of Jira itself, and flavour = {options.flavour} right?"

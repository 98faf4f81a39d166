"""A service of tickets for `penstock connector conform`. It serves what the suite writes."""

from penstock.testing import over_http

PAGE = 3


def playing():
    return over_http(answer, lambda url: {"url": url}, {"TOKEN": "opens-nothing-else"})


def answer(samples, path, query):
    if path == "/groups":
        return samples.members
    if path == "/tickets":
        left = [sample for sample in samples.listed if sample.external_id > query["after"]]
        following = left[PAGE - 1].external_id if len(left) > PAGE else None
        return {"tickets": [ticket(sample) for sample in left[:PAGE]], "next": following}
    sample = samples.documents.get(path.removeprefix("/tickets/"))
    return ticket(sample) if sample else None


def ticket(sample):
    access = {"groups": sample.acl_tags, "restricted_to": sample.required_tags}
    return {"id": sample.external_id, "title": sample.title, "text": sample.text, "changed": sample.revision, **access}

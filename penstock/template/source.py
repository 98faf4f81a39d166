from penstock import source


class Tickets(source.WebSource):
    async def list(self):
        after = ""
        while after is not None:
            page = await self.web.json("GET", "/tickets", params={"after": after})
            yield source.each_entry(page["tickets"], document)
            after = page["next"]

    async def read(self, external_id):
        return document(await self.web.json("GET", f"/tickets/{external_id}"))

    async def groups(self, tags=None):
        for tag, members in (await self.web.json("GET", "/groups")).items():
            yield source.Group(tag, members)

    @staticmethod
    def playground():
        from penstock.testing import over_http  # here: only its test needs it

        text = {"id": "{external_id}", "title": "{title}", "text": "{text}", "changed": "{revision}"}
        ticket = {**text, "groups": "{acl_tags}", "restricted_to": "{required_tags}"}
        listing = {"tickets": [ticket], "next": "{next}"}
        return over_http({"/tickets?after={next}": listing, "/tickets/{external_id}": ticket, "/groups": "{members}"})


def document(ticket):
    text = {"external_id": ticket["id"], "title": ticket["title"], "content": ticket["text"]}
    access = {"acl_tags": ticket["groups"], "required_tags": ticket["restricted_to"]}
    return source.Document(**text, **access, revision=ticket["changed"])

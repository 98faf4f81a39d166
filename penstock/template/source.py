from pydantic import SecretStr

from penstock import source


class Options(source.StrictOptions):
    url: str
    token: SecretStr


class Tickets(source.SmallSource):
    Options = Options

    @staticmethod
    def playground():
        from penstock.template.playground import playing  # here: only its test needs it

        return playing()

    def __init__(self, options, context):
        super().__init__(options, context)
        bearer = f"Bearer {options.token.get_secret_value()}"
        self.web = source.Web(options.url, headers={"Authorization": bearer}, name=context.name)

    async def list(self):
        after = ""
        while after is not None:
            page = await self.web.json("GET", "/tickets", params={"after": after})
            yield [source.Listed(**state(ticket)) for ticket in page["tickets"]]
            after = page["next"]

    async def read(self, external_id):
        ticket = await self.web.json("GET", f"/tickets/{external_id}")
        return source.Document(title=ticket["title"], content=ticket["text"], **state(ticket))

    async def groups(self, tags=None):
        for tag, members in (await self.web.json("GET", "/groups")).items():
            yield source.Group(tag, members)


def state(ticket):
    access = {"acl_tags": ticket["groups"], "required_tags": ticket["restricted_to"]}
    return {"external_id": ticket["id"], "revision": ticket["changed"], **access}

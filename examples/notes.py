import hmac
import json

from pydantic import SecretStr

from penstock import source


class Options(source.StrictOptions):
    url: str
    token: SecretStr
    secret: SecretStr


class Notes(source.SmallSource):
    Options = Options

    @staticmethod
    def playground():
        from connectors.fakes.notes import playing  # here: only its test needs it

        return playing()

    def __init__(self, options, context):
        super().__init__(options, context)
        bearer = f"Bearer {options.token.get_secret_value()}"
        self.web = source.Web(options.url, headers={"Authorization": bearer}, name=context.name)

    async def start(self):
        return {"since": (await self.web.json("GET", "/changes"))["next"]}

    async def full(self, cursor):
        async for notes, after in self.pages(cursor["after"] if cursor else ""):
            yield source.Page([document(note) for note in notes], {"after": after})

    async def list(self):
        async for notes, _ in self.pages(""):
            yield [source.Listed(external_id=n["id"], revision=str(n["revision"]), **access(n)) for n in notes]

    async def pages(self, after):
        while after is not None:
            page = await self.web.json("GET", "/notes", params={"after": after})
            after = page["next"]
            yield page["notes"], after

    async def changes(self, cursor):
        try:
            while (changes := await self.web.json("GET", "/changes", params=cursor))["ids"]:
                cursor = {"since": changes["next"]}
                yield source.Page(await self.fetch(list(set(changes["ids"]))), cursor)
        except source.Missing as error:
            raise source.CursorExpired("the service no longer has changes that old") from error

    async def read(self, external_id):
        return document(await self.web.json("GET", f"/notes/{external_id}"))

    async def groups(self, tags=None):
        for group in (await self.web.json("GET", "/groups"))["groups"]:
            yield source.Group(group["name"], group["members"])

    async def on_event(self, request):
        ours = hmac.new(self.options.secret.get_secret_value().encode(), request.body, "sha256").hexdigest()
        if not hmac.compare_digest(ours, request.headers.get("x-notes-signature", "")):
            raise source.Refused("the signature is not ours")
        return source.Reaction(ids=[json.loads(request.body)["id"]])


def access(note):
    return {"acl_tags": ["staff"], "required_tags": ["board"] if note["restricted"] else []}


def document(note):
    seen = {"title": note["title"], "content": note["text"], "revision": str(note["revision"])}
    return source.Document(external_id=note["id"], **seen, **access(note))

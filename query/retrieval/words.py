"""The words of a question and of a passage, reduced to stems, by language. Pure.

They decide how many of the question's words a passage contains. The question's language is the one most of its function
words belong to; the same stemmer (Snowball) reduces the passages' words. A language that is written without spaces is
compared by pairs of neighbouring characters. Identifiers, such as ``v2.3.1``, are compared whole.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache

from Stemmer import Stemmer

_WORD = re.compile(r"[^\W_]+(?:[._'’-][^\W_]+)*")
_UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\u0e00-\u0e7f]+")
"""Kana, Han, Hangul and Thai."""
_IDENTIFIER = re.compile(r"[\d._-]")
_ELIDED = re.compile(r"^(?:[cdjlmnst]|qu|dell|all|nell|sull|un)['’]")
"""French and Italian articles that are written with the word, as in ``l'eau``."""

STOP_WORDS: Mapping[str, frozenset[str]] = {
    language: frozenset(words.split())
    for language, words in {
        "english": (
            "a about after all also am an and any are as at be been before being between both but by can cannot could "
            "did do does doing for from had has have having he her here his how i if in into is it its just like made "
            "make many may me might more most much must my need needed no nor not of off on one only or other our out "
            "over possible really shall she should so some such than that the their them then there these they this "
            "those through to too under until up upon us use used using very want was way we were what when where "
            "whether which while who whom whose why will with within without would yet you your"
        ),
        "german": (
            "aber alle als also am an auch auf aus bei beim bin bis bist da damit dann das dass dein dem den denn der "
            "des dich die dies diese dieser dieses dir doch dort du durch ein eine einem einen einer eines er es etwas "
            "euch für gegen gibt habe haben hat hatte hier ich ihm ihn ihr ihre im in ist ja jede jeder jetzt kann "
            "kein keine können man mehr mein meine mich mir mit muss nach nicht nichts noch nun nur ob oder ohne sehr "
            "sein seine sich sie sind so soll sollte über um und uns unser unter viel viele vom von vor wann war warum "
            "was weil welche welcher welches wem wen wenn wer werden wie wieder wir wird wo wurde zu zum zur zwischen"
        ),
        "french": (
            "à au aux avec ce cela ces cet cette ceux chez comme comment dans de des donc dont du elle elles en entre "
            "es est et été être eux il ils je la là le les leur leurs lui ma mais me même mes moi mon ne nos notre "
            "nous on ont ou où par pas peut peux plus pour pourquoi qu quand que quel quelle quelles quels qui quoi sa "
            "sans se ses si son sont sous sur ta te tes toi ton tous tout toute toutes très tu un une va vers vos "
            "votre vous y"
        ),
        "spanish": (
            "a al algo ante antes así aunque cada como cómo con cual cuál cuáles cuando cuándo cuánto de del desde "
            "donde dónde dos durante e el él ella ellas ellos en entre era es esa ese eso esta está están este esto "
            "estos fue ha hace hacia han hasta hay la las le les lo los más me mi mis mucho muy nada ni no nos nuestra "
            "nuestro o otra otro para pero por porque puede puedo que qué quien quién se según ser si sí sin sobre son "
            "su sus también tan te tiene todo todos tu un una uno unos y ya yo"
        ),
        "italian": (
            "a ad ai al alla alle allo anche ancora che chi ci ciò come con cosa cui da dai dal dalla dalle dei del "
            "della delle dello di dopo dove e è ed essere fra gli ha hanno ho i il in io la le lei lo loro lui ma me "
            "mi mia mio molto ne nei nel nella nelle noi non nostro o ogni per perché più può qual quale quali quando "
            "quanto quello questa queste questi questo se sei senza si sia siamo solo sono su sua sue sui sul sulla "
            "suo tra tu tutti tutto un una uno vi voi"
        ),
        "portuguese": (
            "a à ao aos as às até com como da das de dela dele depois do dos e é ela elas ele eles em entre era essa "
            "esse esta está este eu foi há isso isto já lhe mais mas me mesmo meu minha muito na não nas nem no nos "
            "nós nossa nosso o os ou para pela pelas pelo pelos pode por porque qual quais quando quanto que quem se "
            "sem ser seu seus só sobre sua suas também te tem têm tudo um uma umas uns você vocês"
        ),
        "dutch": (
            "aan al alle als altijd ben bij daar dan dat de der deze die dit doch doen door dus een en er ge geen "
            "hebben heeft heb het hier hij hoe hun ik in is ja je kan kunnen maar me meer men met mij mijn moet na "
            "naar niet niets nog nu of om omdat onder ons ook op over te tegen toch toen tot u uit uw van veel voor "
            "waar waarom wanneer want waren was wat we wel welke werd wie wij worden wordt zal ze zich zij zijn zo "
            "zonder zou"
        ),
        "swedish": (
            "alla allt att av bara bli blir blev de dem den denna deras dess det detta dig din dina du där efter eller "
            "en er ett för från ha hade han hans har hon hur här i in inte jag kan man med mellan men mig min mina "
            "mot mycket måste ni nu när någon något och om oss på samma sedan sig sin sina ska som så till under upp "
            "ut utan vad var varför vem vi vid vilka vilken vilket är över"
        ),
        "russian": (
            "а без более бы был была были было быть в вам вас весь во вот все всех вы где да для до его ее если есть "
            "еще же за здесь и из или им их к как какая какие какой когда которая которые который кто ли между меня "
            "мне может можно мой мы на над надо нас наш не него нет ни них но о об он она они оно от очень по под "
            "после потому почему при с свой себя со так также такой там то того только том ты у уже чего чем что "
            "чтобы эта эти это этот я"
        ),
    }.items()
}
_UMLAUTS = str.maketrans("äöü", "aou")


def language_of(text: str) -> str:
    """The language, as Snowball calls it, that most function words of a text belong to; English where none does."""
    words = [word.lower() for word in _WORD.findall(text)]
    counts = {language: sum(word in known for word in words) for language, known in STOP_WORDS.items()}
    return max(counts, key=lambda language: counts[language])  # of equal counts the first, English


@cache
def _stemmer(language: str) -> Stemmer:
    return Stemmer(language)


def stems(text: str, language: str = "english") -> set[str]:
    """The content words of a text, reduced to stems. They are compared, never shown."""
    spaced = text if text.isascii() else _UNSPACED.sub(lambda run: f" {' '.join(_pairs(run[0]))} ", text)
    words = set(_WORD.findall(spaced.lower())) - STOP_WORDS[language]
    plain = {word for word in words if word.isalpha()}
    others = {_ELIDED.sub("", word).removesuffix("'s").removesuffix("’s") for word in words - plain}
    identifiers = {word for word in others if _IDENTIFIER.search(word)}
    plain |= others - identifiers - STOP_WORDS[language]
    return identifiers.union(_stemmer(language).stemWords(sorted(plain)))


def _pairs(characters: str) -> list[str]:
    return [characters[n : n + 2] for n in range(max(1, len(characters) - 1))]


def coverage(query_stems: Collection[str], text: str, language: str = "english") -> float:
    """The share of the query's stems that a text contains; 0 if the query has none."""
    return len(set(query_stems) & stems(text, language)) / len(query_stems) if query_stems else 0.0


def best_coverage(query: str, texts: Iterable[str]) -> float:
    """The highest coverage of the query's words by any of the texts. Substring search skips most texts before they are
    split into words: words of one stem begin alike, but for umlauts."""
    language = language_of(query)
    query_stems = stems(query, language)
    beginnings = [stem.translate(_UMLAUTS)[:3] for stem in query_stems]
    best = 0.0
    for text in texts:
        lowered = text.lower().translate(_UMLAUTS)
        if sum(beginning in lowered for beginning in beginnings) > best * len(query_stems):
            best = max(best, coverage(query_stems, text, language))
    return best

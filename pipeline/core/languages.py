"""The language of a chunk, and the languages of a question, with their function words. Pure, and the same everywhere.

Languages have the names of Elasticsearch's analyzers, which are Snowball's too. A small neural network recognises them
(CLD3, by the package cld3-py); a short question's function words count as well. A language without an analyzer of its
own counts as unknown and is analysed like English.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gcld3 import NNetLanguageIdentifier

ENGLISH = "english"
CJK = "cjk"
"""Chinese, Japanese and Korean, which are analysed in the same way: by pairs of neighbouring characters."""
CODES: Mapping[str, str] = {
    "ar": "arabic",
    "cs": "czech",
    "da": "danish",
    "de": "german",
    "el": "greek",
    "en": ENGLISH,
    "es": "spanish",
    "fi": "finnish",
    "fr": "french",
    "hi": "hindi",
    "hu": "hungarian",
    "it": "italian",
    "ja": CJK,
    "ko": CJK,
    "nl": "dutch",
    "no": "norwegian",
    "pt": "portuguese",
    "ro": "romanian",
    "ru": "russian",
    "sv": "swedish",
    "tr": "turkish",
    "zh": CJK,
}
"""ISO 639-1 → language. The network tells further ones apart, so that Polish is not taken for Czech."""
ANALYSED = tuple(sorted(set(CODES.values()) - {ENGLISH}))
"""The languages with an analyzer, besides English, which is everybody's."""

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
        "danish": (
            "ad af aldrig alle at bare begge blev blive bliver da de dem den denne der deres det dette dig din dine "
            "disse du efter eller en end er et få får for fordi fra før hans har have havde hvad hvem hver hvilke "
            "hvilken hvis hvor hvordan hvorfor hvornår i ikke ind ingen jeg kan kun kunne man mange med meget men mere "
            "mig min mit mod må ned nej nogen noget nogle nu når og også om op os over på sammen selv sig sin skal "
            "skulle som så til ud uden under var ved vi vil ville vores være været"
        ),
        "norwegian": (
            "å alle alt at av bare begge ble bli blir bort da de deg dem den denne der deres det dette din disse du "
            "eller en enn er et etter for fordi fra får før gjør ha hadde han har hun hva hvem hver hvilke hvilken "
            "hvis hvor hvordan hvorfor når i ikke ingen inn jeg kan kun kunne man mange med meg meget mellom men mer "
            "min mot mye må nå ned noe noen og også om opp oss over på samme seg selv sin skal skulle slik som så til "
            "under ut uten var ved vi vil ville vår være vært"
        ),
        "finnish": (
            "että ei eivät en hän he ilman ja joka jolla jonka jos jossa jota jotka kaikki kanssa kuin kuinka kun "
            "kuten me mikä miksi milloin minä missä mitä mitkä mukaan mutta myös ne niiden niin nyt olen oli olisi "
            "olivat olla on ovat saa se sekä sen siinä sinä sitä siis tai tämä tämän tässä tätä te tulee vaan vai vain "
            "voi voidaan vuoksi yli"
        ),
        "hungarian": (
            "a ahol akkor alatt ami amely amelyek annak az azok azt csak de egy előtt el és ez ezek ezt fel ha hogy "
            "hogyan hol ide ill is itt kell ki le lehet lesz ma már még meg mely mi mint mit miért mikor minden "
            "most nagyon nem nincs olyan ott össze pedig sem szerint szét tehát utána után vagy van vannak vele volt "
            "voltak"
        ),
        "romanian": (
            "a acea aceasta această acest aceste acestea această acestui aceștia ai al ale am ar are aș asta astfel "
            "atunci au avea că când care ce cel cele cine cu cum da dacă dar de deci din după ea ei ele era este eu "
            "fi fie fiind fost în între îl îi își la le lor lui mai mult ne nici noi nu o ori pe pentru poate prin sa "
            "să sau se și sunt te toate tot un una unde unei unui unor va vom vor"
        ),
        "turkish": (
            "ama ancak artık bana bazı ben beri bir biz bu buna bunu çok çünkü da daha de değil diye en eğer gibi "
            "göre hangi hem her hiç için ile ise kadar kez ki kim mı mi mu mü nasıl ne neden nerede o olan olarak oldu "
            "olduğu olur olursa ona onu onun sadece sen siz sonra şey şu tüm tarafından üzere ve veya var ya yani yok "
            "zaman"
        ),
        "czech": (
            "a aby ale ani až bez bude budou by byl byla bylo byly být co další do i jak jako je jeho jej její jejich "
            "jen jsem jsou jste k kam kde kdo kdy když která které který kteří ma má mezi mi může na nad nebo není "
            "nebyl než o od ona oni ono pak po pod podle pokud potom pro proč protože před při s se si tak také tato "
            "tedy ten tento tím to toho tohoto tomu tu ty u už v však ve více vy z za zde ze že"
        ),
        "greek": (
            "αλλά αν από αυτά αυτές αυτή αυτό αυτός για δεν είναι ένα ένας έχει έχουν η ή θα και κάθε κατά με "
            "μετά μεταξύ "
            "μη μην μια μία μπορεί μπορώ να ο οι όλα όλες όπου όπως όταν ότι ποια ποιες ποιο ποιος πού που πρέπει πριν "
            "προς πώς πως σας σε στα στη στην στις στο στον στους τα τη την της τι τις το τον του τους των ως"
        ),
        "arabic": (
            "أن أو أي أين إذا إلى إلي إن التي الذي الذين ألا أما بعد بعض بل بين تكون تم ثم حتى حيث خلال ذلك سوف عن عند "
            "عندما على غير في فيه فيها قبل قد كان كانت كل كما كيف لا لكن لم لماذا لن له لها لي ما ماذا متى مثل "
            "مع من منذ "
            "منه منها نحو هذا هذه هل هم هناك هو هي و وهو وهي يتم يجب يكون يمكن"
        ),
        "hindi": (
            "अपना अपनी अपने अब आप इन इस इसके उन उस उसके एक ऐसे और कब कर करके करता करते करना करने करें कहाँ का कि "
            "किया किस "
            "किसी की कुछ के कैसे को कोई कौन क्या क्यों गया जब जहाँ जा जाता जाती जैसे जो तक तब तो था थी थे दिया "
            "द्वारा न नहीं "
            "ने पर पहले बाद भी मैं में यदि यह या ये रहा रहे लिए वह वाले वे सकता सकते साथ से हम ही हुआ हुई हुए है "
            "हैं हो होगा "
            "होता होती होते होना होने"
        ),
    }.items()
}
_LANGUAGES_OF: Mapping[str, tuple[str, ...]] = {
    word: tuple(language for language, known in STOP_WORDS.items() if word in known)
    for word in frozenset().union(*STOP_WORDS.values())
}

_ENGLISH_ALONE = STOP_WORDS[ENGLISH].difference(*(known for other, known in STOP_WORDS.items() if other != ENGLISH))

SAMPLE_CHARACTERS = 600
"""How much of a text is read to count words."""
SAMPLE_BYTES = 500
"""How much of a text, in UTF-8, the network reads: five pieces from the beginning to the end."""
ENGLISH_SHARE = 0.06
"""The share of words that only English has, from which on a text is English without asking the network, which takes
ten times as long."""
LEAST_SHARE = 0.03
"""The share of its function words that running text has at least. Below it are code, tables and names."""
UNSPACED_SHARE = 0.1
"""The share of Kana, Han and Hangul that such a text has at least: one says as much as several letters."""
MOST_LANGUAGES = 3
"""The most languages that a question is searched in."""

UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]")
"""A character of Kana, Han or Hangul."""
MARKS = r"\u0300-\u036f\u0900-\u0963"
"""Combining characters, which the expressions do not count as letters: those of decomposed letters and of Hindi."""
_WORD = re.compile(rf"(?:[^\W\d_]|[{MARKS}])+")


def language_of(text: str) -> str | None:
    """The language of a chunk, one of ANALYSED. None: English, or not recognised, as in code, tables and names."""
    sample = text[:SAMPLE_CHARACTERS].lower()
    words = sample.split()
    if sum(map(_ENGLISH_ALONE.__contains__, words)) > ENGLISH_SHARE * len(words):
        return None
    language, is_sure = _identify(text)
    if not is_sure or language is None or language == ENGLISH:
        return None
    if language == CJK:
        return CJK if len(UNSPACED.findall(sample)) > UNSPACED_SHARE * len(sample) else None
    known = STOP_WORDS.get(language)
    if known is None:
        return None if sample.isascii() else language
    return language if sum(map(known.__contains__, words)) > LEAST_SHARE * len(words) else None


def languages_of_question(text: str) -> tuple[str, ...]:
    """The languages that a question may be in, none or more of ANALYSED, the likeliest first; a question may mix them.
    Searching in a wrong one costs little. Empty: it is in English, or in no language that is recognised."""
    sample = text[:SAMPLE_CHARACTERS]
    likely = [CJK] if UNSPACED.search(sample) else []
    counts = count_function_words(sample)
    english = counts.pop(ENGLISH, 0)
    most = max(counts.values(), default=0)
    language, is_sure = _identify(sample)
    if english < 2 * max(most, 1) or (is_sure and language != ENGLISH):
        likely += [language] if language and not (is_sure and language == ENGLISH) else []
        likely += [other for other, count in counts.most_common() if count * 2 >= max(most, english)]
    return tuple(language for language in dict.fromkeys(likely) if language != ENGLISH)[:MOST_LANGUAGES]


def language_of_question(text: str) -> str:
    """The one language whose words a question has most of: ENGLISH where none is recognised, or in CJK, whose words
    of other scripts are mostly English."""
    sample = text[:SAMPLE_CHARACTERS]
    counts = count_function_words(sample)
    if counts:
        return max(counts, key=lambda language: (counts[language], language == ENGLISH))
    language, is_sure = _identify(sample)
    return language if language and is_sure and language != CJK else ENGLISH


def count_function_words(text: str) -> Counter[str]:
    """How many words of this text are function words of each language."""
    return Counter(language for word in _WORD.findall(text.lower()) for language in _LANGUAGES_OF.get(word, ()))


def _identify(text: str) -> tuple[str | None, bool]:
    """The likeliest language, None for one without an analyzer; and whether it is sure."""
    result = _network().FindLanguage(text.encode(errors="ignore"))
    return CODES.get(result.language), result.is_reliable


@cache
def _network() -> NNetLanguageIdentifier:
    from gcld3 import NNetLanguageIdentifier  # not where no language matters: 20 ms

    return NNetLanguageIdentifier(0, SAMPLE_BYTES)

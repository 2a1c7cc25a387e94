"""The words that everything in the simulation is made of: tokenizer training text, workloads and answers.

Written for this project, so that no third-party corpus is needed. Random choices are always drawn from a generator
that the caller passes.
"""

from __future__ import annotations

from random import Random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = _words(
    """
    account address agent amount animal answer apple archive arrow article author autumn balance bank barrel basket
    battery beach bell bicycle bird blanket boat book border bottle branch bread bridge brother budget building
    button cabin camera candle canvas captain card carpet castle center chair channel chapter child circle city
    claim clerk climate clock cloud coast coffee color column company contract corner country courage course craft
    crew crystal culture current customer danger daughter decision degree delivery desert design desk detail device
    diagram dinner distance doctor door dream drawer edge effort engine entrance error evening event example
    exchange factory family farmer father feature fence field figure finger fire fish flight floor flower folder
    forest frame friend garden gate glass goal grain group guest guide hall hammer hand harbor harvest hat heart
    height history holiday horizon horse hospital hotel hour house idea image index injury insurance invoice iron
    island item journey judge kettle key kitchen knife ladder lake lamp language law leader leather lesson letter
    level library light limit line list lock machine magnet manager manual map market material matter meadow meal
    measure medicine meeting member memory message metal method mile mirror model moment money month morning mother
    motor mountain museum music name neighbor network night north note number object ocean offer office oil order
    organ owner package page paint paper parcel parent park part partner party passage path patient pattern payment
    peace pencil people person phone picture piece pilot place plan planet plant plate platform player pocket poem
    point police policy port position power prairie price problem process product profit program project proof
    purpose question queue railway rain reader reason receipt record region report request result return reward
    rhythm river road rock roof room root rope rule salt sample sand school science screen sea season seat second
    section seed sentence service session shadow shape ship shop shore signal silver sister size skill sky slope
    smoke snow soil soldier song sound source south space speech speed spring square stage star station steam step
    stone storage store storm story stranger stream street string student subject sugar summer sun supply surface
    system table tail task teacher team test text theory thread ticket tide timber time token tool topic tower town
    track trade train travel treasure tree trip truck truth uncle unit valley value vessel village visit voice
    volume wagon wall water wave weather week weight wheel window winter wire witness wood word work worker world
    writer yard year
    """
)
VERBS = _words(
    """
    accept add agree allow answer appear apply arrive ask assist avoid begin believe belong borrow bring build burn
    buy call carry catch change check choose clean clear climb close collect compare complete confirm connect
    consider contain continue copy count cover create cross cut decide deliver depend describe develop discover
    discuss draw drive drop earn enter escape examine expect explain fall feed feel fetch fill find finish follow
    forget form gather give grow guard guess happen hear help hold hope improve include inform inspect invite join
    jump keep know land last laugh lead learn leave lend lift listen live load look lose love make mark measure
    meet mention miss mix move need notice open order pack paint pass pay perform pick plan play point pour prefer
    prepare present press prevent produce promise protect prove pull push quote raise reach read receive refuse
    remain remember remove repair repeat replace reply report require rest return ride ring rise run save search
    see sell send serve set settle share shine show sign sing sleep smile solve sort speak spend stand start state
    stay stop study suggest support switch talk teach tell thank think throw touch translate travel trust try turn
    understand use verify visit wait walk want warn wash watch weigh wish wonder work write
    """
)
ADJECTIVES = _words(
    """
    able active ancient average bitter blue brave brief bright broad brown busy calm careful certain cheap clever
    cold common complete cool correct crisp curious daily dark deep different dirty double dry eager early easy
    empty equal exact fair famous fast fine firm flat fresh friendly full gentle glad golden good grand gray great
    green happy hard heavy high hollow honest huge hungry important kind large late lazy light little local lonely
    long loud lovely low lucky main modern narrow natural near neat new nice noble normal odd old open ordinary
    pale patient plain pleasant polite poor private proud public quick quiet rare ready real recent red rich right
    rough round safe secret serious sharp short silent simple slow small smooth soft solid special steady strange
    strict strong sudden sweet tall thick thin tidy tiny tired true usual vast warm weak western wet white whole
    wide wild wise wooden yellow young
    """
)
GLUE = _words(
    """
    a about above after again against all also although always an and another any are around as at away back be
    because been before behind below between both but by can could did do does down each either else enough even
    ever every few first for four from had has have he her here him his how however if in into is it its just less
    many may me might more most much must my near never next no none nor not nothing now of off often on once one
    only or other our out over perhaps please rather same she should since so some soon still such than that the
    their them then there these they this those three through to together too toward two under until up upon us
    very was we well were what when where whether which while who why will with within without would yes yet you
    your
    """
)


def sentence(rng: Random, words: int = 12) -> str:
    """One English-looking sentence of about `words` words, at least four."""
    parts: list[str] = []
    while len(parts) < max(4, words):
        parts += (rng.choice(GLUE), rng.choice(ADJECTIVES), rng.choice(NOUNS), rng.choice(VERBS))
    return " ".join(parts[: max(4, words)]).capitalize() + "."


def prose(rng: Random, words: int) -> str:
    """Sentences of together about `words` words."""
    sentences: list[str] = []
    left = words
    while left > 0:
        length = rng.randint(7, 16)
        sentences.append(sentence(rng, min(length, max(4, left))))
        left -= length
    return " ".join(sentences)

"""llama.cpp grammars (GBNF) allow the same texts here as in llama.cpp, character by character."""

import time
from contextlib import suppress

import pytest
from llguidance import LLMatcher, LLTokenizer

from keepsight import StructuredOutputsParams
from keepsight.errors import InvalidArgumentError
from keepsight.gbnf import is_gbnf
from keepsight.structured_outputs import MAX_GRAMMAR_CHARACTERS

BYTES = LLTokenizer("byte")
ARITHMETIC = r"""
# llama.cpp's own: what ends a number may be the end of the line, too
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws  # a name
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
SQL = """
    root ::= select_statement
    select_statement ::= "SELECT " column " from " table
    column ::= "col_1" | "col_2"
        | "*"
    table ::= "table_1" | "table_2"
"""


def allows(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, StructuredOutputsParams(grammar=grammar).to_grammar(), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "allowed", "forbidden"),
    [
        (ARITHMETIC, ["1=2\n", "a_1 +(3*x) = 4\n\nb=c \n"], ["1=2", "=1\n", "(1=2\n", "A=1\n"]),
        (SQL, ["SELECT col_1 from table_2", "SELECT * from table_1"], ["SELECT col_1 from ", "select"]),
        # A greedy terminal would leave nothing for what follows it.
        ('root ::= word "a"\nword ::= [a-z]+', ["bba", "aa"], ["a", "bb", ""]),
        ('root ::= "(" root ")" | word "a"\nword ::= [a-z]+', ["bba", "((aa))"], ["(bb)", "(aa"]),
        ('root ::= "<" root ">" | "a" "b" | "abc" "d"', ["<ab>", "abcd"], ["<abc>"]),
        # Characters
        (r'root ::= "\x41\u00e9\U0001f600\t\n\"\\" "/é"', ['Aé😀\t\n"\\/é'], ["A"]),
        (r"root ::= [\u00e9\x41-C\]\-z] [^\[^\n] [-a] [a-]", ["éxa-", "B]-a", "-äaa", "]]--"], ["b]--", "é[aa"]),
        ("root ::= [a&&b] [/~~] [+--] [[:]", ["&/,[", "a~+:"], ["c/+["]),
        ("root ::= . .", ["\n\x00", "é😀"], ["a"]),
        ('root ::= "two\nlines"', ["two\nlines"], ["twolines"]),
        # Names
        ("root ::= a-b a_b A-B start 1\na-b::=[x]\na_b::=[y]\nA-B::=[z]\nstart::=[s]\n1::=[1]", ["xyzs1"], ["xxzs1"]),
        # Repetitions and empty rules
        ('root ::= "ab"{2} [c]{1,} "d"{ 0 ,\n2 }', ["ababc", "ababccdd"], ["abab", "abb", "ababcddd"]),
        ('root ::= "(" root ")" | ("ab"+ "c"?)*', ["", "((abab))", "abcab"], ["abb"]),
        ('root ::= () "" | x\nx ::=', [""], ["a"]),
        ('root ::= "(" root ")" | | x\nx ::= \nunused ::= root', ["", "()"], ["("]),
        ('root ::= ("a" |\n\n "b" # or\n | ) "c"\n\n\n# end', ["ac", "bc", "c"], ["ab"]),
        ('root ::= "a" b b ::= "::=" # c ::= [d', ["a::="], ["a"]),
        ('\r\nroot ::= a\r\na ::= "x"\r\n', ["x"], ["y"]),
    ],
)  # fmt: skip
def test_a_text_is_allowed_where_llama_cpp_allows_it(grammar: str, allowed: list[str], forbidden: list[str]) -> None:
    assert [text for text in allowed if not allows(grammar, text)] == []
    assert [text for text in forbidden if allows(grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('root ::= "a" b', "there is no rule 'b'"),
        ('a ::= "a"', "there is no rule 'root'"),
        ("root ::= [a]\nroot ::= [b]", "line 2: rule 'root' is defined twice"),
        ('x\nroot ::= "a"', "line 1: expected the start of a rule"),
        ('root ::= "a"\n  "b', "line 2: cannot be parsed: '\"b'"),
        ("root ::= [a", "line 1: cannot be parsed: '[a'"),
        ("root ::= <think>", "line 1: cannot be parsed"),
        ('root ::= ("a"', "line 1: unmatched parenthesis"),
        ('root ::= "a")', "line 1: unmatched parenthesis"),
        ('root ::= ("a"\nb ::= "c")', "line 2: unmatched parenthesis"),
        ('root ::= * "a"', "line 1: nothing for * to repeat"),
        ('root ::= "a"*{2}', "line 1: nothing for {2} to repeat"),
        ("root ::= []", "line 1: empty character class"),
        ("root ::= [^]", "line 1: empty character class"),
        ("root ::= [z-a]", "line 1: range ends before it begins: 'z-a'"),
        (r'root ::= "\q"', r"line 1: invalid escape: '\\q'"),
        (r'root ::= "\u00"', r"line 1: invalid escape: '\\u00'"),
        (r'root ::= "\ud800"', r"line 1: not a character: \ud800"),
        (r"root ::= [\U00110000]", r"line 1: not a character: \U00110000"),
    ],
)
def test_an_error_names_the_line(grammar: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        StructuredOutputsParams(grammar=grammar)
    assert caught.value.field == "structured_outputs.grammar"
    assert caught.value.message.startswith(f"cannot be read as GBNF: {message}")
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    "lark",
    ['start: "::="', 'start: /a ::=/ x // root ::= "a"\nx: "root ::= "', 'start: a\na: "b"', "start: x\n// a ::= b"],
)
def test_lark_grammars_are_left_unchanged(lark: str) -> None:
    assert StructuredOutputsParams(grammar=lark).grammar == lark


def test_a_converted_grammar_is_not_converted_again() -> None:
    made = StructuredOutputsParams(grammar='root ::= "\\nroot ::= " [:=] | root')
    assert not is_gbnf(str(made.grammar))
    assert StructuredOutputsParams(grammar=made.grammar) == made


def test_a_hostile_grammar_takes_bounded_time() -> None:
    room = MAX_GRAMMAR_CHARACTERS - 100
    names = "\n".join(f"r{each} ::= r{each + 1}" for each in range(4000))
    for hostile in (
        "root ::= " + "(" * room,
        "root ::= " + "(" * (room // 2) + ")" * (room // 2),
        "root ::= " + "a" * room,
        "root ::= " + "a " * (room // 2),
        "root ::= " + '"' * (room - 1),
        "root ::= " + '"\\' * (room // 2),
        "root ::= [" + "\\x41-" * (room // 6),
        'root ::= "a"{1,' + " " * room,
        "root ::= a" + " " * room + ":",
        "a" * room + "\nroot ::= [a]",
        "root ::= r0\n" + names + '\nr4000 ::= "a"',
        "root ::= r0\n" + names + "\nr4000 ::= root",
    ):
        began = time.process_time()
        with suppress(InvalidArgumentError):
            StructuredOutputsParams(grammar=hostile).to_grammar()
        assert time.process_time() - began < 6, hostile[:30]

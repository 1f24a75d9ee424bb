"""Reading tables: CSV files as people write them, records, and one line for each thing that is wrong."""

import re

import numpy as np
import pytest

from jaxformer.errors import ConfigError
from jaxformer.scaling.csv_reader import Rows
from jaxformer.scaling.table import Table

SAME = [
    "N,D,loss\n1000000,2.5e9,3.25\n2000000,1.25e9,3.5\n",
    "\ufeffN,D,loss\r\n1000000,2.5e9,3.25\r\n2000000,1.25e9,3.5\r\n",
    '"N","D","loss"\n"1,000,000","2,500,000,000","3.25"\n"2,000,000","1,250,000,000","3.5"\n',
    "N;D;loss\n1 000 000;2,5e9;3,25\n2 000 000;1,25e9;3,5\n",
    "N;D;loss\n1.000.000,0;2,5e9;3,25\n2.000.000,0;1,25e9;3,5\n",
    "N\tD\tloss\n1_000_000\t2.5E+09\t+3.25\n2e6\t1.25E9\t3.50\n",
    "N | D | loss\n1'000'000 | 2.5e9 | 3.25\n2'000'000 | 1.25e9 | 3.5\n",
    "N   D   loss\n1e6  2.5e9   3.25\n2e6  1.25e9  3.5\n",
    "# a sweep\n\nN,D,loss\n\n# small\n1e6,2.5e9,3.25\n   \n,,\n2e6,1.25e9,3.5\n\n",
    "# N,D,loss\n1e6,2.5e9,3.25\n2e6,1.25e9,3.5\n",
    " n , D ,Loss,note\n1e6,2.5e9,3.25,hello\n2e6,1.25e9,3.5,\n",
    ",N,D,loss,\n0,1e6,2.5e9,3.25,\n1,2e6,1.25e9,3.5,\n",
    "N,D,loss\n1 \u00d7 10^6,2.5*10**9,3.25\n2x10^6,1.25\u00b710^9,3.5\n",
]


@pytest.mark.parametrize("text", SAME, ids=range(len(SAME)))
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_one_table_written_in_many_ways(tmp_path, text, encoding):
    path = tmp_path / "table.csv"
    path.write_bytes(text.encode(encoding))
    table = Table.from_csv(path, n="N", d="D", loss="loss")
    assert table.n.tolist() == [1e6, 2e6] and table.d.tolist() == [2.5e9, 1.25e9] and table.loss.tolist() == [3.25, 3.5]


@pytest.mark.parametrize("name", ["Training FLOP", "training flop", "training_flop", " TrainingFLOP ", "training-flop"])
def test_names_match_whatever_their_case_and_blanks(name):
    rows = Rows.from_text("Model Size,Training FLOP,loss\n1e6,6e15,3\n", "t.csv")
    assert rows.column(name).tolist() == [6e15]


def test_an_exact_name_goes_before_a_similar_one():
    rows = Rows.from_text("n,N,loss\n1,2,3\n", "t.csv")
    assert rows.column("n").tolist() == [1] and rows.column("N").tolist() == [2]
    with pytest.raises(ConfigError, match="2 columns are called 'n_'"):
        rows.column("n_")


def test_tokens_come_from_flops_and_parameters():
    table = Table.of(n=[1e6, 2e6], c=[6e15, 6e15], loss=[3, 3.1])
    assert table.d.tolist() == [1e9, 5e8] and table.derived == ("D",)
    assert Table.of(n=[1e6], d=[1e9], loss=[3]).c.tolist() == [6e15]
    assert Table.of(d=[1e9], c=[6e15], loss=[3]).n.tolist() == [1e6]
    assert Table.of(n=[1e6], c=[8e15], loss=[3], flops_constant=8.0).d.tolist() == [1e9]
    given = Table.of(n=[1e6], d=[1e9], c=[9e15], loss=[3])
    assert given.c.tolist() == [9e15] and given.derived == ()
    assert Table.of(n=[1e6], loss=[3]).known == ("N",)


BAD = [
    ("N,D,loss\n1e6,1e9,3\n2e6,nan,3\n", "row 2 (line 3), column 'D': 'nan'; accepted: a finite number"),
    ("N,D,loss\n1e6,1e9,3\n\n2e6,,3\n", "row 2 (line 4), column 'D': empty"),
    ("N,D,loss\n1e6,1e9,3\n2e6,inf,3\n", "row 2 (line 3), column 'D': 'inf'"),
    (
        "N,D,loss\n1e6,1e9,3\n2e6,1.2B,3\n",
        "row 2 (line 3), column 'D': '1.2B'; accepted: a finite number without a unit",
    ),
    ("N,D,loss\n1e6,1e9,3\n2e6,1e9,0\n", "row 2 (line 3), column 'loss': 0.0; accepted: a number above 0"),
    ("N,D,loss\n1e6,1e9,-3\n", "row 1 (line 2), column 'loss': -3.0"),
    ("N,D,loss\n1e6,1e9\n", "row 1 (line 2), column 'loss': empty"),
    ("N,D,loss\n1e6,1e9,3,4\n", "line 2 has 4 cells, the header 3"),
    ("N;D;loss\n1e6;1e9;3,142\n", "row 1 (line 2), column 'loss': '3,142' could be 3.142 or 3142"),
    ("N,D,los\n1e6,1e9,3\n", "no column 'loss'; did you mean 'los'? It has 'N', 'D', 'los'"),
    ("a,b,c\n1e6,1e9,3\n", "no column 'N'; it has 'a', 'b', 'c'"),
    ("N,D,N,loss\n1,1,1,1\n", "2 columns are called 'N'"),
    ("N,D,loss\n", "a header and no rows"),
    ("\n# nothing\n", "empty; expected a header line"),
    ("1e6,1e9,3\n2e6,1e9,3\n", "line 1 holds only numbers; expected column names"),
    ("N,D,loss\n1\0,2,3\n", "not a text file"),
]


@pytest.mark.parametrize("text, says", BAD, ids=[says[:40] for _, says in BAD])
def test_bad_tables_are_one_line_each(tmp_path, text, says):
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(says)) as error:
        Table.from_csv(path, n="N", d="D", loss="loss")
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.csv: no such file"):
        Table.from_csv(tmp_path / "nowhere.csv", n="N", loss="loss")
    with pytest.raises(ConfigError, match="is not a regular file; accepted: a file, not a folder"):
        Table.from_csv(tmp_path, n="N", loss="loss")


def test_the_highest_losses_are_dropped_and_rows_keep_their_numbers():
    table = Table.of(n=np.arange(1.0, 6), loss=[3, 9, 2, 8, 1], clusters=list("abcde")).drop_highest_loss(2)
    assert table.loss.tolist() == [3, 2, 1] and table.rows.tolist() == [1, 3, 5]
    assert table.names == ("row 1", "row 3", "row 5") and table.clusters == ["a", "c", "e"]
    for count in (-1, 3):
        with pytest.raises(ConfigError, match=f"drop-highest-loss: {count}; accepted: 0 to 2"):
            table.drop_highest_loss(count)


def test_columns_of_different_lengths_and_no_variable_are_refused():
    with pytest.raises(ConfigError, match="D has 3 values and there are 2 rows"):
        Table.of(n=[1, 2], d=[1, 2, 3], loss=[3, 3])
    with pytest.raises(ConfigError, match="neither N nor D nor C"):
        Table.of(loss=[3, 3])

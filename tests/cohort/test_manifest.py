import shutil

import pytest

from its2clr.cohort import check_manifest, read_manifest
from its2clr.errors import InputError

BAGS = """bag_id,label,group,split
a1,0,pa,train
a2,1,pb,train
b1,0,pc,val
b2,1,pd,val
c1,0,pe,test
c2,1,pf,test
"""
INSTANCES = "bag_id,file,label\n" + "".join(
    f"{bag},img.png,{label}\n" for bag, label in [("a1", 0), ("a2", 1), ("b1", 0), ("b2", 1), ("c1", 0), ("c2", 1)]
)


@pytest.fixture
def write(tmp_path, make_picture):
    make_picture(0).save(tmp_path / "img.png")

    def write(bags=BAGS, instances=INSTANCES, encoding="utf-8"):
        (tmp_path / "bags.csv").write_text(bags, encoding=encoding)
        (tmp_path / "instances.csv").write_text(instances, encoding=encoding)
        return tmp_path / "bags.csv", tmp_path / "instances.csv"

    return write


BAD_BAGS = [
    (
        "missing column",
        ("bag_id,label", "bag_id,lable"),
        1,
        "column 'label' is missing.*did you mean 'lable'",
    ),
    ("twice in other case", ("bag_id,label", "bag_id,label,Label"), 1, "column 'label' appears twice"),
    ("repeated column", ("group,split", "label,split"), 1, "column 'label' appears twice"),
    ("duplicate bag", ("b1,0", "a1,0"), 4, "bag_id 'a1' was already used in row 2"),
    ("label", ("a2,1,", "a2,yes,"), 3, "label is 'yes', expected 0 or 1"),
    ("label 2", ("a2,1,", "a2,2,"), 3, "label is '2', expected 0 or 1"),
    ("empty label", ("a2,1,", "a2,,"), 3, "label is '', expected 0 or 1"),
    ("empty bag", ("b2,1", ",1"), 5, "bag_id is empty"),
    ("long bag", ("b2,1", "b" * 300 + ",1"), 5, "too long"),
    (
        "group in two splits",
        ("pc,val", "pa,val"),
        4,
        "group 'pa' is in split 'val' here and in 'train' in row 2",
    ),
    ("unknown split", ("pd,val", "pd,dev"), 5, "split is 'dev', expected train, val or test"),
    ("partial split", ("pd,val", "pd,"), 5, "split is empty while other rows have one"),
    ("partial group", ("pd,val", ",val"), 5, "group is empty while other rows have one"),
    ("too many values", ("pd,val", "pd,val,more"), 5, "5 values under 4 columns"),
    (
        "bag without instances",
        ("c2,1,pf,test\n", "c2,1,pf,test\nc3,1,pg,test\n"),
        8,
        "bag 'c3' has no instances",
    ),
    ("after an empty line", ("b1,0", "\nb1,x"), 5, "label is 'x'"),
]


@pytest.mark.parametrize(("change", "row", "message"), [case[1:] for case in BAD_BAGS], ids=[c[0] for c in BAD_BAGS])
def test_wrong_bags_are_named_by_file_and_row(write, change, row, message):
    assert change[0] in BAGS
    bags, instances = write(bags=BAGS.replace(*change, 1))
    _, problems = check_manifest(bags, instances)
    with pytest.raises(InputError, match=message) as raised:
        read_manifest(bags, instances)
    assert f"{bags}, row {row}: " in str(raised.value)
    assert f"{bags}, row {row}" in [problem.where for problem in problems]


BAD_INSTANCES = [
    (
        "missing column",
        ("bag_id,file", "bag_id,filename"),
        1,
        "column 'file' is missing.*did you mean 'filename'",
    ),
    ("unknown bag", ("b1,img.png,0", "b1,img.png,0\nzz,img.png,0"), 5, "bag_id 'zz' is not in "),
    ("empty bag", ("b1,img.png,0", "b1,img.png,0\n,img.png,0"), 5, "bag_id is empty"),
    ("empty file", ("b1,img.png", "b1,"), 4, "file is empty"),
    ("label", ("b1,img.png,0", "b1,img.png,maybe"), 4, "label is 'maybe'"),
]


@pytest.mark.parametrize(
    ("change", "row", "message"), [case[1:] for case in BAD_INSTANCES], ids=[c[0] for c in BAD_INSTANCES]
)
def test_wrong_instances_are_named_by_file_and_row(write, change, row, message):
    assert change[0] in INSTANCES
    bags, instances = write(instances=INSTANCES.replace(*change, 1))
    with pytest.raises(InputError, match=message) as raised:
        read_manifest(bags, instances)
    assert f"{instances}, row {row}: " in str(raised.value)


@pytest.mark.parametrize(
    ("bags", "message"),
    [
        (BAGS.replace("b2,1,pd,val", "b2,0,pd,val"), "split 'val' has no bag with label 1"),
        (BAGS.replace("c1,0,pe,test", "c1,1,pe,test"), "split 'test' has no bag with label 0"),
        (BAGS.replace(",val", ",train"), "no bag is in split 'val'"),
        (BAGS.replace(",val", ",test").replace(",train", ",test"), "--unlabelled packs bags"),
        (BAGS.replace(",1,", ",0,").replace(",split", ",x"), "no bag has label 1"),
        ("bag_id,label\n", "no bags below the header"),
        ("", "first row must name the columns"),
    ],
)
def test_whole_file_problems_name_the_file(write, bags, message):
    path, instances = write(bags=bags)
    with pytest.raises(InputError, match=message) as raised:
        read_manifest(path, instances)
    assert str(path) in str(raised.value)


def test_files_that_cannot_be_read(write, tmp_path):
    bags, instances = write(bags=BAGS.replace("pa", "pä"), encoding="latin-1")
    with pytest.raises(InputError, match=r"bags\.csv: is not UTF-8"):
        read_manifest(bags, instances)
    with pytest.raises(InputError, match=r"none\.csv: does not exist"):
        read_manifest(tmp_path / "none.csv")
    write()
    with pytest.raises(InputError, match=r"none\.csv: does not exist"):
        read_manifest(bags, tmp_path / "none.csv")
    with pytest.raises(InputError, match=r"nowhere: the folder of the images does not exist"):
        read_manifest(bags, instances, tmp_path / "nowhere")


def test_wrong_images_root_is_seen_at_once(write, tmp_path):
    bags, instances = write()
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(InputError, match=r"row 2: none of the files exist.*elsewhere/img\.png.*images root"):
        read_manifest(bags, instances, tmp_path / "elsewhere")


def test_all_problems_come_in_one_error(write):
    bags, instances = write(bags=BAGS.replace("a2,1", "a2,x").replace("b1,0", "b1,y"))
    with pytest.raises(InputError) as raised:
        read_manifest(bags, instances)
    assert "2 problems" in str(raised.value)
    assert "row 3: label is 'x'" in str(raised.value)
    assert "row 4: label is 'y'" in str(raised.value)


def test_ten_problems_are_listed_and_the_others_counted(write):
    rows = "".join(f"bag{i},x\n" for i in range(25))
    bags, instances = write("bag_id,label\n" + rows, "bag_id,file\n" + "".join(f"bag{i},img.png\n" for i in range(25)))
    with pytest.raises(InputError) as raised:
        read_manifest(bags, instances)
    message = str(raised.value)
    assert message.startswith("25 problems")
    assert message.count("label is 'x'") == 10
    assert message.endswith("and 15 more")


def test_names_of_columns_are_read_in_any_case(write):
    header = BAGS.split("\n", 1)[0]
    plain = read_manifest(*write())
    other = read_manifest(*write(bags=BAGS.replace(header, header.title(), 1)))
    assert other.bags["split"].tolist() == plain.bags["split"].tolist()
    assert other.bags["group"].tolist() == plain.bags["group"].tolist()
    assert other.has_splits


def test_good_manifest_with_instances(write, tmp_path):
    bags = BAGS.replace("group", "patient").replace(",val", ",Validation", 1).replace(",val", ",valid")
    path, instances = write(bags=bags, instances=INSTANCES.replace("b1,img.png,0", "b1,img.png,"))
    manifest = read_manifest(path, instances)
    assert manifest.has_splits
    assert manifest.has_instance_labels
    assert manifest.bags["split"].tolist() == ["train", "train", "val", "val", "test", "test"]
    assert manifest.bags["group"].tolist() == ["pa", "pb", "pc", "pd", "pe", "pf"]
    assert manifest.bags["label"].tolist() == [0, 1, 0, 1, 0, 1]
    assert manifest.bags.index.tolist() == [2, 3, 4, 5, 6, 7]
    assert manifest.instances["label"].tolist() == [0, 1, -1, 1, 0, 1]
    assert set(manifest.instances["file"]) == {str(tmp_path / "img.png")}


def test_identifiers_stay_as_written_and_more_columns_are_kept(write):
    ids = ["007", "a/b c", "NA", "1e5", "ü,x", "null"]
    rows = "".join(f'"{bag_id}",{i % 2},s{i},0{i}\n' for i, bag_id in enumerate(ids))
    bags, instances = write(
        "\ufeffbag_id,label,site,code\n" + rows,
        "bag_id,file\n" + "".join(f'"{bag_id}",img.png\n' for bag_id in ids),
    )
    manifest = read_manifest(bags, instances)
    assert manifest.bags["bag_id"].tolist() == ids
    assert manifest.bags["group"].tolist() == ids
    assert manifest.bags["code"].tolist() == ["00", "01", "02", "03", "04", "05"]
    assert not manifest.has_splits
    assert not manifest.has_instance_labels


@pytest.mark.parametrize("separator", [";", "\t"])
def test_other_separators(write, separator):
    bags, instances = write(BAGS.replace(",", separator), INSTANCES.replace(",", separator))
    assert len(read_manifest(bags, instances).bags) == 6


@pytest.fixture
def folders(tmp_path, make_picture):
    lines = ["bag_id,path,label"]
    for i in range(6):
        folder = tmp_path / "bags" / f"tumor_{i}"
        folder.mkdir(parents=True)
        make_picture(i).save(folder / "b.PNG")
        make_picture(i + 50).save(folder / "a.jpg")
        (folder / "Thumbs.db").write_text("x")
        (folder / "._a.jpg").write_text("x")
        lines.append(f"{i},bags/tumor_{i},{i % 2}")
    lines[-1] = f"5,{tmp_path / 'bags' / 'tumor_5'},1"
    (tmp_path / "manifest.csv").write_text("\n".join(lines))
    return tmp_path / "manifest.csv"


def test_good_manifest_of_folders(folders):
    manifest = read_manifest(folders)
    assert manifest.instances["name"].tolist() == ["a.jpg", "b.PNG"] * 6
    assert manifest.instances.index.tolist() == [row for row in range(2, 8) for _ in range(2)]
    assert "path" not in manifest.bags.columns
    assert manifest.bags["label"].tolist() == [0, 1, 0, 1, 0, 1]
    assert not manifest.has_instance_labels


def test_wrong_folders_are_named_by_row(folders):
    shutil.rmtree(folders.parent / "bags" / "tumor_0")
    for file in (folders.parent / "bags" / "tumor_1").glob("[ab]*"):
        file.unlink()
    changes = {"bags/tumor_2": "manifest.csv", "bags/tumor_3": "", "bags/tumor_4": "a" * 300}
    text = folders.read_text()
    for before, after in changes.items():
        text = text.replace(before, after)
    folders.write_text(text)
    _, problems = check_manifest(folders)
    found = {problem.where: problem.message for problem in problems}
    assert "does not exist" in found[f"{folders}, row 2"]
    assert "bag '1' has no images" in found[f"{folders}, row 3"]
    assert "is not a folder" in found[f"{folders}, row 4"]
    assert "path is empty" in found[f"{folders}, row 5"]
    assert sum("does not exist" in message for message in found.values()) == 2


def test_table_of_bags_alone_is_explained(write):
    bags, _ = write()
    with pytest.raises(InputError, match=r"row 1: column 'path' is missing.*give a table of instances"):
        read_manifest(bags)

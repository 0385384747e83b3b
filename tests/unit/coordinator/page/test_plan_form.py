"""The form that writes a plan, as a browser without script sees it, and the same by API and commands."""

import html
import math
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import tomllib
from PIL import Image

from coordinator.members.api_tokens import Role
from coordinator.page.plan_form import edited
from coordinator.pki.authority import create_ca
from edge_client.agent.owner import part_bytes
from fedcg.learning.method_choice import method_choice, recommended
from fedcg.learning.networks.plans import complete_spec
from fedcg.learning.spec import FederationPlan
from fedcg.wire.parts import Part
from tests.support.commands import run_fedcg
from tests.support.page.pages import ServedPage, tiny_page

NEW, SHOW = "/federations/new", "/federations/new/plan"
PLAN = 'federation = "f"\nclasses = ["x", "y"]\nmethod = "fedcg"\nrounds = 2  # few\n[input]\nmode = "L"\nheight = 28\nwidth = 28\nmean = [0.5]\nstd = [0.5]\n[params]\nepochs = 3'


class Form(HTMLParser):
    """The fields of the plan's form, as a browser sends them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fields: dict[str, str] = {}
        self._select = self._area = ""
        self.feed(text.partition('id="plan"')[2].partition("</form>")[0])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        has = {name: value or "" for name, value in attrs}
        if tag == "input" and ("checked" in has or has.get("type") not in ("radio", "checkbox")):
            self.fields[has["name"]] = has.get("value", "")
        elif tag == "select":
            self._select = has["name"]
        elif tag == "option" and ("selected" in has or self._select not in self.fields):
            self.fields[self._select] = has.get("value", "?")
        self._area = has["name"] if tag == "textarea" else ""

    def handle_data(self, data: str) -> None:
        if self._area:
            self.fields[self._area] = data.replace("\r", "").replace("\n", "\r\n")
        elif self._select and self.fields.get(self._select) == "?":
            self.fields[self._select] = data


@pytest.fixture
def page(tmp_path: Path) -> Iterator[ServedPage]:
    with tiny_page(tmp_path, rounds=3, clients=("a", "b")) as running:
        running.application.state.home.make_folders()
        create_ca(running.application.state.home.pki)
        running.made.world.key.save(running.application.state.home.signing_key)
        yield running


def test_a_federation_is_duplicated_by_form_api_and_command_with_errors_at_the_fields(page: ServedPage) -> None:
    reader, store = page.reader(), page.made.world.store
    assert "/federations/new?like=tiny" in reader.get("/f/tiny")[1]
    fields = Form(reader.get(f"{NEW}?like=tiny")[1]).fields
    status, _, text = reader.post(NEW, **fields | {"rounds": "0", "federation": "tiny"})
    assert (status, len(store.federations())) == (422, 1)
    for name, problem in (("rounds", "must be greater than"), ("federation", ""), ("input.mean", "")):
        field = text.partition(f'id="p-{name}"')[2].partition("</p></div>")[0]
        assert ('aria-invalid="true"' in field, problem in field) == (bool(problem), True), name
    again = Form(text).fields | {"rounds": "3"}
    text = reader.post(NEW, **again | {"input.height": "28", "input.width": "28"})[2]
    assert '<b class="bad">already exists; choose another name' in text
    text = reader.post(NEW, **fields)[2]
    assert '<b class="bad">lenet5_relu needs images of at least 16x16' in text.partition('id="h-network.split"')[2]
    sent = {name: value for name, value in Form(text).fields.items() if name != "start"}
    status, headers, _ = reader.post(NEW, **sent | {"input.height": "28", "input.width": "28"})
    assert (status, headers["location"]) == (303, "/f/tiny-2")
    old, new = (page.made.coordinator.spec(store.federation(name)) for name in ("tiny", "tiny-2"))
    assert store.federation("tiny-2").policy == store.federation("tiny").policy
    assert (new.classes, new.seed, new.codec, new.params["server_iterations"]) == (old.classes, 1, "f32", 4)
    place = ("--url", f"http://127.0.0.1:{page.port}")
    environment = {"FEDCG_API_TOKEN": page.token(Role.VIEWER)}
    printed = run_fedcg("federation", "duplicate", "tiny-2", *place, environment=environment).output
    plan = FederationPlan.model_validate(tomllib.loads(printed))
    assert plan.federation == "tiny-3"
    assert complete_spec(plan) == new.model_copy(update={"federation": "tiny-3"})
    address = html.unescape(reader.get("/f/tiny-2/models")[1].partition('href="/federations/new')[2].partition('"')[0])
    text = reader.get(f"{NEW}{address}")[1]
    assert "It starts with the weights of tiny-2@0." in text
    assert reader.post(NEW, **Form(text).fields | {"start": "no"})[0] == 303
    assert store.federation("tiny-3").continued_from is not None
    assert reader.get(f"{NEW}?continued_from=tiny@9")[0] == 404


def test_fields_and_text_follow_each_other_and_nothing_else_of_a_plan_changes() -> None:
    assert edited(PLAN, PLAN, {"rounds": "2", "classes": "x\r\ny", "deadline_s": "3600"}) == PLAN
    by_hand = PLAN.replace("epochs = 3", "epochs = 4")
    both = tomllib.loads(edited(by_hand, PLAN, {"rounds": "9", "max_clients": "7", "classes": " a b\n\n😀"}))
    assert (both["rounds"], both["max_clients"], both["params"]) == (9, 7, {"epochs": 4})
    assert both["classes"] == ["a b", "😀"]
    assert "max_clients" not in edited(f"max_clients = 7\n{PLAN}", f"max_clients = 7\n{PLAN}", {"max_clients": ""})
    other = tomllib.loads(edited(PLAN, PLAN, {"method": "fedsplit", "input.mode": "RGB"}))
    assert (other["params"], other["input"]["mean"]) == ({"aux": 1, "ema": 0.998}, [0.5] * 3)
    backbone = tomllib.loads(edited(PLAN, PLAN, {"network.split": "efficientnet_lite0+project"}))["network"]
    assert (len(backbone["weights"]), backbone["freeze"]) == (64, "all")


@pytest.mark.parametrize(
    "text",
    ["x = ", "a = " + "[" * 9000, "input = 5\nclasses = 5", "[network]\nsplit = 3\n[input]\nmode = 1979-05-27", ""],
)
def test_any_text_is_shown_again_with_its_problems_and_creates_nothing(page: ServedPage, text: str) -> None:
    reader = page.reader()
    odd = {"rounds": "9" * 4000, "input.mean": "[NaN", "method": "", "open": "?", "plan": text, "network.split": "x"}
    for path in (SHOW, NEW):
        status, _, answer = reader.post(path, form_of=NEW, **odd)
        assert (status, 'role="alert"' in answer) == (200 if path == SHOW else 422, True)
    assert len(page.made.world.store.federations()) == 1
    assert "Only operators" in page.reader(Role.VIEWER).get(NEW)[1]


def test_the_questions_lead_to_a_method_as_the_flowchart_of_the_docs_does(page: ServedPage) -> None:
    chart = Path("docs/explanation/methods.md").read_text()
    edges = re.findall(r"^  (q\d)(?:\{.*?\})? -- (yes|no|\"no, or.*?\") --> (\w+)", chart, re.MULTILINE)
    steps = [(at, yes, no) for at, (_, yes, no) in method_choice()["steps"].items()]
    drawn = [(at, way == "yes", to) for at, way, to in edges]
    assert sorted(drawn) == sorted(edge for at, yes, no in steps for edge in ((at, True, yes), (at, False, no)))
    assert recommended({}) == (["open", "secret", "differ"], "fedcg")
    reader = page.reader()
    fields = Form(reader.get(NEW)[1]).fields
    assert method_choice()["questions"].keys() <= fields.keys()
    text = reader.post(SHOW, **fields | {"secret": "yes"})[2]
    plan = tomllib.loads(Form(text).fields["plan"])
    assert (plan["method"], plan["min_clients"]) == ("fedseal", 4)
    assert Form(text).fields["method"] == ""


def test_networks_have_their_sizes_for_a_plan_on_the_page_and_in_the_api(page: ServedPage) -> None:
    plan = FederationPlan.model_validate(tomllib.loads(PLAN))
    spec = complete_spec(plan)
    model = spec.layouts[Part.EXTRACTOR] + spec.layouts[Part.CLASSIFIER]
    weights = sum(math.prod(one.shape) for one in model)
    sent = sum(part_bytes(spec).values())
    reader = page.reader()
    shown = Form(reader.post(SHOW, form_of=NEW, plan=PLAN)[2])
    assert shown.fields["network.split"] == "lenet5_relu"
    text = reader.post(SHOW, form_of=NEW, plan=PLAN)[2].partition('data-url="/api/v1/networks?')[2]
    query = html.unescape(text.partition('"')[0])
    answer = reader.ask("GET", f"/api/v1/networks?{query}", Accept="application/json")[2]
    assert f'"split":"lenet5_relu","parameters":{weights},"update_bytes":{sent}' in answer
    assert page.reader(Role.VIEWER).get(f"/api/v1/networks?{query}")[0] == 403


def test_a_folder_of_images_makes_a_plan_with_what_was_measured(tmp_path: Path) -> None:
    for name, grey in (("good", 51), ("crack", 153)):
        (tmp_path / "Line 4" / name).mkdir(parents=True)
        Image.new("RGB", (64, 48), (grey,) * 3).save(tmp_path / "Line 4" / name / "1.png")
    made = run_fedcg("federation", "plan", "--from", str(tmp_path / "Line 4"))
    plan = FederationPlan.model_validate(tomllib.loads(made.output))
    # half of the pixels are 51 / 255 = 0.2, the others 0.6: mean 0.4, deviation 0.2; 64 x 48 pixels become 32 x 24
    assert (plan.federation, plan.classes, plan.image.mean, plan.image.std) == (
        "line-4",
        ("crack", "good"),
        (0.4,),
        (0.2,),
    )
    assert (plan.image.mode, plan.image.height, plan.image.width) == ("L", 24, 32)
    assert run_fedcg("federation", "plan", "--from", str(tmp_path / "none")).exit_code == 2

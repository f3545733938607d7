"""docs/http_api.md says what the code does."""

from pathlib import Path

from gateway.error_responses import STATUS_OF_ERROR
from gateway.openai_api import ChatCompletionRequest, ChatMessage, CompletionRequest

PAGE = (Path(__file__).parents[2] / "docs" / "http_api.md").read_text()


def test_every_field_and_every_refusal_has_its_row():
    fields_table, _, rest = PAGE.partition("## Refused by name")
    refusals_table = rest.partition("## Errors")[0]
    for model in (CompletionRequest, ChatCompletionRequest):
        for name in model.model_fields:
            assert f"`{name}`" in fields_table, name
    for model in (CompletionRequest, ChatCompletionRequest, ChatMessage):
        for name in model.refused:
            assert f"`{name}`" in refusals_table, name


def test_every_error_code_has_its_status():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    for error_class, status in STATUS_OF_ERROR.items():
        assert any(str(int(status)) in row and f"`{error_class.code}`" in row for row in rows), error_class


def test_reasons_on_the_page_are_those_that_clients_read():
    for model in (CompletionRequest, ChatCompletionRequest):
        for reason in model.refused.values():
            assert reason in PAGE, reason

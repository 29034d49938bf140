"""Clients of all kinds, each asked in the same way; for what a client is there, see `ADAPTERS`.

An adapter's `chat`, `stream`, `tools` and `parsed` give the answer, its pieces, the answer behind
the results of tools, and an answer as a `Person`.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch one
MODEL, QUESTION = "scripted", "How is the weather in Oslo and Rome?"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}


class Person(BaseModel):
    """A person of whom one asks."""

    name: str
    age: int


def get_weather(city: str) -> str:
    """The weather in a city."""
    return {"Oslo": "rainy", "Rome": "dry"}[city]


def load(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        pytest.skip("`make test-clients` has it")


def stock(module: str) -> dict[str, Any]:
    """Options of a stock client; certificates take longer to load than requests."""
    plain = load(module).DefaultHttpxClient(verify=False)
    return {"api_key": "any", "max_retries": 0, "http_client": plain}


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


class Adapter:
    """What most have in common; a way that is None is not what the client is for."""

    chat: Any = None
    stream: Any = None
    tools: Any = None
    parsed: Any = None

    def __init__(self, url: str) -> None:
        self.url = url


class LangChain(Adapter):
    responses = False

    def model(self) -> Any:
        return load("langchain_openai").ChatOpenAI(
            model=MODEL,
            base_url=f"{self.url}/v1",
            api_key="any",
            max_retries=0,
            stream_usage=True,
            use_responses_api=self.responses,
        )

    def chat(self, text: str) -> str:
        return str(self.model().invoke(text).text)

    def stream(self, text: str) -> list[str]:
        return [chunk.text for chunk in self.model().stream(text)]

    def tools(self, text: str) -> str:
        messages = load("langchain_core.messages")
        tooled = self.model().bind_tools([get_weather])
        history = [messages.HumanMessage(text)]
        history.append(first := tooled.invoke(history))
        for call in first.tool_calls:
            result = get_weather(**call["args"])
            history.append(messages.ToolMessage(result, tool_call_id=call["id"]))
        second = tooled.invoke(history)
        cached = second.usage_metadata["input_token_details"]["cache_read"]
        assert cached == first.usage_metadata["total_tokens"] - 1
        return str(second.text)

    def parsed(self, text: str) -> Any:
        if self.responses:
            return self.model().with_structured_output(Person).invoke(text)
        for method in ("function_calling", "json_mode", "json_schema"):
            person = self.model().with_structured_output(Person, method=method).invoke(text)
        return person


class LangChainResponses(LangChain):
    responses = True


class LlamaIndex(Adapter):
    def model(self) -> Any:
        return load("llama_index.llms.openai_like").OpenAILike(
            model=MODEL,
            api_base=f"{self.url}/v1",
            api_key="any",
            is_chat_model=True,
            is_function_calling_model=True,
            should_use_structured_outputs=True,
            max_retries=0,
        )

    def _user(self, text: str) -> list[Any]:
        model = self.model()  # skips
        message = load("llama_index.core.llms").ChatMessage
        assert model.complete(text).text
        return [message(role="user", content=text)]

    def chat(self, text: str) -> str:
        return str(self.model().chat(self._user(text)).message.content)

    def stream(self, text: str) -> list[str]:
        return [part.delta or "" for part in self.model().stream_chat(self._user(text))]

    def tools(self, text: str) -> str:
        model, agents = self.model(), load("llama_index.core.agent.workflow")

        async def talk() -> str:
            return str(await agents.FunctionAgent(tools=[get_weather], llm=model).run(text))

        return asyncio.run(talk())

    def parsed(self, text: str) -> Any:
        return self.model().as_structured_llm(Person).chat(self._user(text)).raw


class LiteLLM(Adapter):
    provider, path = "openai", "/v1"

    def complete(self, messages: list[Any], **more: Any) -> Any:
        options = {"model": f"{self.provider}/{MODEL}", "api_key": "any"}
        url = f"{self.url}{self.path}"
        return load("litellm").completion(messages=messages, api_base=url, **options, **more)

    def chat(self, text: str) -> str:
        return str(self.complete(user(text)).choices[0].message.content)

    def stream(self, text: str) -> list[str]:
        parts = self.complete(user(text), stream=True)
        return [part.choices[0].delta.content or "" for part in parts]

    def tools(self, text: str) -> str:
        question, more = user(text), {"tools": [WEATHER]}
        message = self.complete(question, **more).choices[0].message
        results = [
            {
                "role": "tool",
                "tool_call_id": call.id,
                "content": get_weather(**json.loads(call.function.arguments)),
            }
            for call in message.tool_calls
        ]
        second = self.complete([*question, message.model_dump(), *results], **more)
        return str(second.choices[0].message.content)

    def parsed(self, text: str) -> Any:
        answer = self.complete(user(text), response_format=Person)
        return Person.model_validate_json(answer.choices[0].message.content)


class LiteLLMHosted(LiteLLM):
    provider = "hosted_vllm"


class LiteLLMAnthropic(LiteLLM):
    provider, path = "anthropic", ""
    parsed: Any = None


class Agents(Adapter):
    """OpenAI's SDK."""

    kind = "OpenAIChatCompletionsModel"

    def _run(self, text: str, **more: Any) -> Any:
        agents = load("agents")
        agents.set_tracing_disabled(True)  # it would go to OpenAI
        api = load("openai").AsyncOpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0)
        model = getattr(agents, self.kind)(model=MODEL, openai_client=api)
        settings = agents.ModelSettings(include_usage=True)
        return agents, agents.Agent(name="one", model=model, model_settings=settings, **more)

    def chat(self, text: str) -> str:
        agents, agent = self._run(text)
        return str(agents.Runner.run_sync(agent, text).final_output)

    def stream(self, text: str) -> list[str]:
        agents, agent = self._run(text)

        async def talk() -> list[str]:
            events = agents.Runner.run_streamed(agent, text).stream_events()
            raw = [event.data async for event in events if event.type == "raw_response_event"]
            return [one.delta for one in raw if one.type == "response.output_text.delta"]

        return asyncio.run(talk())

    def tools(self, text: str) -> str:
        tool = load("agents").function_tool(get_weather)
        agents, agent = self._run(text, tools=[tool])
        result = agents.Runner.run_sync(agent, text)
        first, second = (answer.usage for answer in result.raw_responses)
        assert second.input_tokens_details.cached_tokens == first.total_tokens - 1
        return str(result.final_output)

    def parsed(self, text: str) -> Any:
        agents, agent = self._run(text, output_type=Person)
        return agents.Runner.run_sync(agent, text).final_output


class AgentsResponses(Agents):
    kind = "OpenAIResponsesModel"


class PydanticAI(Adapter):
    def model(self) -> Any:
        provider = load("pydantic_ai.providers.openai").OpenAIProvider
        made = provider(base_url=f"{self.url}/v1", api_key="any")
        return getattr(load("pydantic_ai.models.openai"), self.kind)(MODEL, provider=made)

    kind = "OpenAIChatModel"

    def agent(self, **more: Any) -> Any:
        return load("pydantic_ai").Agent(self.model(), **more)

    def chat(self, text: str) -> str:
        return str(self.agent(instructions="Be kind.").run_sync(text).output)

    def stream(self, text: str) -> list[str]:
        async def talk() -> list[str]:
            async with self.agent().run_stream(text) as answer:
                return [part async for part in answer.stream_text(delta=True, debounce_by=None)]

        return asyncio.run(talk())

    def tools(self, text: str) -> str:
        answer = self.agent(tools=[get_weather]).run_sync(text)
        first, second = (m.usage for m in answer.all_messages() if m.kind == "response")
        assert second.cache_read_tokens == first.input_tokens + first.output_tokens - 1
        return str(answer.output)

    def parsed(self, text: str) -> Any:
        for kind in ("ToolOutput", "NativeOutput", "PromptedOutput"):
            output = getattr(load("pydantic_ai"), kind)(Person)
            person = self.agent(output_type=output, retries=0).run_sync(text).output
        return person


class PydanticAIResponses(PydanticAI):
    kind = "OpenAIResponsesModel"


class PydanticAIMessages(PydanticAI):
    def model(self) -> Any:
        api = load("anthropic").AsyncAnthropic(base_url=self.url, api_key="any", max_retries=0)
        provider = load("pydantic_ai.providers.anthropic").AnthropicProvider(anthropic_client=api)
        profile = {"supports_json_schema_output": True}  # it goes by the names of Anthropic's
        models = load("pydantic_ai.models.anthropic")
        return models.AnthropicModel(MODEL, provider=provider, profile=profile)


class Instructor(Adapter):
    """Answers as classes, which is all that it is for."""

    def client(self, mode: str) -> Any:
        instructor, openai = load("instructor"), load("openai")
        api = openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0)
        return instructor.from_openai(api, mode=instructor.Mode[mode])

    def parsed(self, text: str) -> Any:
        asked: Any = {"model": MODEL, "messages": user(text), "response_model": Person}
        for mode in ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "MD_JSON"):
            person = self.client(mode).chat.completions.create(max_retries=0, **asked)
            assert isinstance(person, Person)
        for mode in ("TOOLS", "JSON_SCHEMA"):
            parts = [*self.client(mode).chat.completions.create_partial(**asked)]
            assert parts[-1].model_dump() == person.model_dump() and len(parts) > 2
        client = self.client("RESPONSES_TOOLS")
        again = client.responses.create(model=MODEL, input=text, response_model=Person)
        assert again.model_dump() == person.model_dump()
        return Person(**person.model_dump())


class InstructorAnthropic(Instructor):
    def parsed(self, text: str) -> Any:
        instructor, anthropic = load("instructor"), load("anthropic")
        api = anthropic.Anthropic(base_url=self.url, api_key="any", max_retries=0)
        client = instructor.from_anthropic(api, mode=instructor.Mode.ANTHROPIC_TOOLS)
        asked: Any = {"model": MODEL, "messages": user(text), "response_model": Person}
        return Person(**client.messages.create(max_tokens=500, **asked).model_dump())


class OpenAI(Adapter):
    """What `tests/runtime/server` does not ask of the stock clients: their helpers."""

    def client(self) -> Any:
        return load("openai").OpenAI(base_url=f"{self.url}/v1", **stock("openai"))

    def parsed(self, text: str) -> Any:
        answer = self.client().responses.parse(model=MODEL, input=text, text_format=Person)
        person = answer.output_parsed
        answer = self.client().chat.completions.parse(
            model=MODEL, messages=user(text), response_format=Person
        )
        assert answer.choices[0].message.parsed == person
        return person


class Anthropic(Adapter):
    def client(self) -> Any:
        return load("anthropic").Anthropic(base_url=self.url, **stock("anthropic"))

    def tools(self, text: str) -> str:
        *_, last = self.client().beta.messages.tool_runner(
            model=MODEL,
            max_tokens=500,
            tools=[load("anthropic").beta_tool(get_weather)],
            messages=user(text),
        )
        return str(last.content[0].text)

    def parsed(self, text: str) -> Any:
        answer = self.client().messages.parse(
            model=MODEL, max_tokens=500, messages=user(text), output_format=Person
        )
        return answer.parsed_output


ADAPTERS: list[Callable[[str], Any]] = [
    *(OpenAI, Anthropic, LangChain, LangChainResponses, LlamaIndex),
    *(LiteLLM, LiteLLMHosted, LiteLLMAnthropic, Agents, AgentsResponses),
    *(PydanticAI, PydanticAIResponses, PydanticAIMessages, Instructor, InstructorAnthropic),
]

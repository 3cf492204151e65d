"""A workflow that calls the policy through the client that the context provides."""

from __future__ import annotations

from typing import Any

from shared.workflow import LLM, Context, Trajectory


async def agent(row: dict[str, Any], llm: LLM, ctx: Context) -> Trajectory:
    answer = await ctx.openai.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": row["prompt"]}]
    )
    ctx.state["text"] = answer.choices[0].message.content
    return llm.trajectory()

"""One evaluation of the demo model and one of its conversion, shared by the tests."""

import pytest

from ladder_residual.distributed.world import World
from ladder_residual.evaluate import harness
from ladder_residual.evaluate.plan import Plan
from ladder_residual.evaluate.run import Session
from ladder_residual.evaluate.tasks import wanted_tasks
from tests.eval_files import TASKS


@pytest.fixture(scope="session")
def tasks(task_folder):
    return harness.load_tasks(wanted_tasks(TASKS), [task_folder])


@pytest.fixture(scope="session")
def plan(story_text):
    return Plan(wanted_tasks(TASKS), perplexity=story_text, context=100, stride=40)


@pytest.fixture(scope="session")
def standard(plan, tasks, demo_dir):
    return Session(plan, World()).evaluate(str(demo_dir), tasks)


@pytest.fixture(scope="session")
def converted(plan, tasks, demo_dir):
    return Session(plan, World()).evaluate(str(demo_dir), tasks, wiring="ladder:last-half")

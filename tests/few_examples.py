"""Settings of properties whose examples are slow, such as those that run on several processes."""

from hypothesis import settings

few_examples = settings(max_examples=max(settings.default.max_examples // 4, 1))

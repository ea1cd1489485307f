"""Parts of messages that are images and videos: what is read of them, and what is refused."""

import pytest

from dflash_jax.media.errors import MediaError
from dflash_jax.media.parts import media_part

URL = "data:image/png;base64,AAAA"


@pytest.mark.parametrize("key", ["max_pixels", "resized_height", "video_start"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_settings_that_would_change_the_pixels_are_refused_by_name(key, is_nested):
    part = {"type": "image_url", "image_url": {"url": URL} | ({key: 7} if is_nested else {})}
    with pytest.raises(MediaError, match=f"m: {key} is not possible: use detail"):
        media_part(part if is_nested else part | {key: 7}, "m")


def test_what_changes_nothing_is_accepted():
    part = {"type": "image_url", "image_url": {"url": URL}, "uuid": "a", "cache_control": {}, "max_pixels": None}
    assert media_part(part, "m").source == URL

import io
import json

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dflash_jax.errors import InputError
from dflash_jax.media.errors import MediaError
from dflash_jax.media.limits import MediaLimits
from dflash_jax.media.processor import ImageSettings, image_settings, read_image, smart_resize
from tests.media.encoded import encoded, picture

SMALL = ImageSettings(patch_size=4, min_pixels=256, max_pixels=4096)
OTHER = ImageSettings(patch_size=14, mean=(0.48, 0.45, 0.4), std=(0.27, 0.26, 0.28), min_pixels=3136, max_pixels=50_176)


def expected(image: Image.Image, settings: ImageSettings) -> tuple[np.ndarray, list[int]]:
    """Patches and grid of transformers."""
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels},
        patch_size=settings.patch_size,
        merge_size=settings.merge_size,
        image_mean=list(settings.mean),
        image_std=list(settings.std),
    )
    outputs = processor(images=[image], return_tensors="np")
    return outputs["pixel_values"], outputs["image_grid_thw"][0].tolist()


def check(data: bytes, settings: ImageSettings) -> None:
    medium = read_image(data, settings)
    patches, grid = expected(ImageOps.exif_transpose(Image.open(io.BytesIO(data))), settings)
    assert list(medium.grid) == grid
    assert medium.tokens == np.prod(grid) // settings.merge_size**2
    assert medium.patches().dtype == np.float32
    np.testing.assert_array_equal(medium.patches(), patches)


# Within the limits, above, below; ties of round(); sides shorter than a block.
@pytest.mark.parametrize("size", [(100, 150), (48, 80), (480, 640), (16, 16), (17, 31), (3, 500), (700, 9), (208, 240)])
@pytest.mark.parametrize("settings", [ImageSettings(), SMALL, OTHER], ids=["qwen", "small", "other"])
def test_patches_are_those_of_transformers(size, settings):
    check(encoded(picture(*size)), settings)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16"])
def test_patches_of_every_mode_are_those_of_transformers(mode):
    image = picture(40, 60, "L" if mode == "I;16" else mode)
    check(encoded(image.convert("I;16") if mode == "I;16" else image), SMALL)


@pytest.mark.parametrize(
    ("form", "mode", "options"),
    [
        ("JPEG", "RGB", {}),
        ("JPEG", "CMYK", {}),
        ("WEBP", "RGBA", {"lossless": True}),
        ("BMP", "RGB", {}),
        ("GIF", "P", {"transparency": 3}),
        ("GIF", "P", {"save_all": True, "append_images": [picture(40, 60, "P", 1)]}),
    ],
)
def test_patches_of_every_format_are_those_of_transformers(form, mode, options):
    check(encoded(picture(40, 60, mode), form, **options), SMALL)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_of_exif_is_applied(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture(40, 72), "JPEG", exif=exif)
    check(data, SMALL)
    assert read_image(data, SMALL).grid == ((1, 10, 18) if orientation < 5 else (1, 18, 10))


def test_published_sizes():
    settings = ImageSettings()
    sizes = {(100, 150): 70, (480, 640): 300, (2000, 3000): 5828, (20_000, 20_000): 16_384}
    for size, tokens in sizes.items():
        height, width = smart_resize(*size, settings)
        assert height * width // 1024 == tokens, size


def test_an_open_image_is_read():
    image = picture(40, 60)
    assert read_image(image, SMALL).key == read_image(encoded(image), SMALL).key


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", 400),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 400),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", 400),
        (encoded(picture(9, 9), "TIFF"), 400),
        (encoded(picture(90, 90))[:400], 400),
        (encoded(picture(90, 90), "JPEG")[:400], 400),
        (encoded(picture(1, 20_000)), 400),
        (encoded(picture(201, 1)), 400),
        (encoded(Image.new("1", (9_000, 8_000))), 413),
        (encoded(Image.new("1", (20_000, 20_000))), 413),
    ],
    ids=["empty", "svg", "eps", "tiff", "cut png", "cut jpeg", "1 x 20000", "201 x 1", "72 Mpx", "400 Mpx"],
)
def test_other_content_is_refused(data, status):
    with pytest.raises(MediaError) as error:
        read_image(data)
    assert error.value.status == status


def test_pixels_are_limited_before_they_are_decoded():
    data = encoded(picture(40, 60))
    with pytest.raises(MediaError, match="60 × 40 pixels: at most 2399"):
        # Cut behind the header: decoding it would be another error.
        read_image(data[:100], limits=MediaLimits(pixels=2399))
    read_image(data, limits=MediaLimits(pixels=2400))


PUBLISHED = {
    "size": {"longest_edge": 16_777_216, "shortest_edge": 65_536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}


def test_settings_come_from_the_checkpoint(tmp_path):
    assert image_settings(tmp_path) == ImageSettings()
    path = tmp_path / "processor_config.json"
    path.write_text(json.dumps({"image_processor": PUBLISHED | {"patch_size": 8}}))
    assert image_settings(tmp_path) == ImageSettings(patch_size=8)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(PUBLISHED))
    assert image_settings(tmp_path) == ImageSettings()
    path.write_text(json.dumps({"min_pixels": 1024, "max_pixels": 2048, "image_mean": [0, 0.1, 0.2], "resample": 3}))
    assert image_settings(tmp_path) == ImageSettings(min_pixels=1024, max_pixels=2048, mean=(0, 0.1, 0.2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no JSON"),
        ("[1]", r"\[1\] in place of a processor's fields"),
        ('{"size": 3}', "size is 3"),
        ('{"patch_size": 0}', "patch_size is 0"),
        ('{"patch_size": "16"}', "patch_size is '16'"),
        ('{"image_std": [0, 1, 1]}', "std is"),
        ('{"image_mean": [0, 1]}', "3 numbers"),
        ('{"resample": 2}', "resample is 2: only 3"),
        ('{"do_resize": false}', "do_resize is False"),
        ('{"size": {"shortest_edge": 9, "longest_edge": 8}}', "longest_edge is 8"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(tmp_path, text, message):
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(InputError, match=message) as error:
        image_settings(tmp_path)
    assert "preprocessor_config.json" in str(error.value)


def with_scans(jpeg: bytes, scans: int) -> bytes:
    """A progressive JPEG whose last scan is repeated until there are ``scans``."""
    at, count = jpeg.rindex(b"\xff\xda"), jpeg.count(b"\xff\xda")
    return jpeg[:at] + jpeg[at:-2] * (scans - count + 1) + jpeg[-2:]


def test_scans_of_a_jpeg_are_limited():
    """Those of the image that is decoded: not of a thumbnail, and not what follows its end."""
    exif = Image.Exif()
    exif[0x9286] = fakes = b"\xff\xda" * 100
    progressive = encoded(picture(40, 60), "JPEG", progressive=True)
    told = encoded(picture(40, 60), "JPEG", progressive=True, exif=exif, comment=fakes, restart_marker_blocks=1)
    for given in (told, with_scans(progressive, 64), progressive * 20):
        read_image(given)
    for given in (with_scans(progressive, 65), with_scans(progressive, 2000)):
        with pytest.raises(MediaError, match="more than 64 scans") as error:
            read_image(given)
        assert error.value.status == 413
        read_image(given, limits=MediaLimits(scans=2000))

import pytest
import torch
from tests.conftest import TINY

from its2clr.config import EncoderConfig
from its2clr.encoders import create_encoder, extract_features
from its2clr.encoders.encoder import check_tile_size
from its2clr.encoders.extraction import pass_size
from its2clr.encoders.weights import check_same_network, create_network, load_network, save_network
from its2clr.engine.devices import Engine
from its2clr.errors import InputError
from its2clr.files import hash_files
from its2clr.settings import parse_override, resolve_config
from its2clr.tile_store import TileStore


@pytest.fixture(scope="module")
def engine():
    engine = Engine()
    engine.bars.enabled = False
    return engine


@pytest.fixture(scope="module")
def tiles():
    return TileStore(torch.randint(0, 256, (37, 3, 32, 32), dtype=torch.uint8))


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return create_network(resolve_config("demo", TINY))


def test_features_do_not_depend_on_the_batch_size_or_on_the_state_of_training(network, tiles, engine):
    network.train()
    whole = extract_features(network.encoder, tiles, engine, batch_size=64)
    assert network.training
    parts = extract_features(network.encoder, tiles, engine, batch_size=5)
    assert torch.allclose(whole, parts, atol=1e-5)
    assert torch.equal(whole, extract_features(network.encoder, tiles, engine, batch_size=64))
    single = network.encoder.eval()(tiles.images[3:4])
    assert torch.allclose(whole[3:4], single, atol=1e-5)


def test_tiles_are_normalised_with_the_encoders_constants():
    encoder = create_encoder(EncoderConfig(name="resnet18", options={"channels": [8, 8, 8, 8], "stem_width": 8}))
    seen = {}
    encoder.backbone.register_forward_pre_hook(lambda _, inputs: seen.update(x=inputs[0]))
    tiles = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    encoder(tiles)
    for channel in range(3):
        expected = (tiles[:, channel] / 255 - EncoderConfig().mean[channel]) / EncoderConfig().std[channel]
        assert torch.allclose(seen["x"][:, channel], expected, atol=1e-6)


def test_gradients_reach_every_parameter_of_the_encoder(network):
    from its2clr.losses.supcon import supervised_contrastive_loss

    _, embeddings = network.train()(torch.rand(8, 3, 32, 32))
    supervised_contrastive_loss(embeddings, torch.arange(8) % 2, None, 0.2).backward()
    missing = [n for n, p in network.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert missing == []
    # timm starts the last batch norm of a residual branch at zero, so what stands before it has zero gradient.
    assert network.encoder.backbone.conv1.weight.grad.abs().sum() > 0


def test_instance_norm_features_do_not_depend_on_the_rest_of_the_batch():
    config = EncoderConfig(norm="instance", options={"channels": [8, 8, 8, 8], "stem_width": 8})
    encoder = create_encoder(config).train()
    tiles = torch.rand(4, 3, 64, 64)
    assert torch.allclose(encoder(tiles)[:2], encoder(tiles[:2]), atol=1e-5)


def test_saved_networks_come_back_equal(network, tmp_path):
    path = tmp_path / "encoder.safetensors"
    save_network(path, network, resolve_config("demo", TINY), {"name": "start"})
    loaded = load_network(path)
    images = torch.rand(3, 3, 32, 32)
    for one, other in zip(network.eval()(images), loaded.eval()(images), strict=True):
        assert torch.equal(one, other)
    first = hash_files(path)
    save_network(path, create_network(resolve_config("demo", TINY)), resolve_config("demo", TINY), {})
    assert hash_files(path) != first


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "resnet81"}, "did you mean 'resnet"),
        ({"name": "resnet18", "options": {"width": 3}}, "options"),
        ({"options": {"checkpoint_path": "theirs.pth"}}, r"options\.checkpoint_path: give weights as encoder\.weights"),
    ],
)
def test_a_wrong_name_or_option_is_said(config, message):
    with pytest.raises(InputError, match=message):
        create_encoder(EncoderConfig(**config))


def test_an_encoder_that_cannot_take_the_tiles_is_said():
    encoder = create_encoder(EncoderConfig(norm="instance"))
    check_tile_size(encoder, 64)
    with pytest.raises(InputError, match=r"tiles of 32 x 32 pixels"):
        check_tile_size(encoder, 32)


def test_a_vit_for_another_size_of_tiles_is_said_with_its_size():
    encoder = create_encoder("vit_tiny_patch16_224", img_size=64, depth=1)
    with pytest.raises(
        InputError, match=r"96 x 96 pixels: it is built for 64 x 64\. Set encoder\.options\.img_size=96"
    ):
        check_tile_size(encoder, 96)
    with pytest.raises(InputError, match=r"crops of 32 x 32 .* Set encoder\.options\.dynamic_img_size=true"):
        check_tile_size(encoder, 32, crops=True)
    several = create_encoder("vit_tiny_patch16_224", img_size=64, depth=1, dynamic_img_size=True)
    check_tile_size(several, 96)
    with pytest.raises(InputError, match=r"divisible by patch size"):
        check_tile_size(several, 50)


def test_a_start_for_another_size_of_tiles_names_the_way(tmp_path):
    vit = ["encoder.name=vit_tiny_patch16_224", "encoder.options={depth: 1, img_size: 64}"]
    config = resolve_config(None, dict(parse_override(text) for text in vit))
    save_network(tmp_path / "vit.safetensors", create_network(config), config, {})
    check_same_network(tmp_path / "vit.safetensors", config)
    other = config.model_copy(
        update={"encoder": config.encoder.model_copy(update={"options": {"depth": 1, "img_size": 96}})}
    )
    with pytest.raises(
        InputError, match=r"other settings of encoder\.options .* give it as encoder\.weights=.*resampled"
    ):
        check_same_network(tmp_path / "vit.safetensors", other)
    deeper = config.model_copy(
        update={"encoder": config.encoder.model_copy(update={"options": {"depth": 2, "img_size": 64}})}
    )
    with pytest.raises(InputError, match=r"other settings of encoder\.options") as refused:
        check_same_network(tmp_path / "vit.safetensors", deeper)
    assert "resampled" not in str(refused.value)


def test_trying_the_tile_size_changes_nothing():
    encoder = create_encoder("resnet18", channels=[8, 8, 8, 8], stem_width=8).eval()
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    check_tile_size(encoder, 32)
    assert not encoder.training
    assert all(torch.equal(before[name], tensor) for name, tensor in encoder.state_dict().items())


def test_weights_of_another_model_are_refused(network, tmp_path):
    from its2clr.engine.checkpoint import load_checkpoint, save_checkpoint

    path = tmp_path / "encoder.safetensors"
    save_network(path, network, resolve_config("demo", TINY), {})
    tensors, state = load_checkpoint(path)
    tensors.pop("encoder.backbone.conv1.weight")
    save_checkpoint(path, tensors, state)
    with pytest.raises(InputError, match=r"do not fit[\s\S]*conv1.weight"):
        load_network(path)


def test_a_tile_has_the_same_features_alone_and_among_others(network, tiles, engine):
    whole = extract_features(network.encoder, tiles, engine)
    for rows in (
        torch.tensor([3]),
        torch.arange(5, 22),
        torch.randperm(37, generator=torch.Generator().manual_seed(1)),
    ):
        assert torch.equal(extract_features(network.encoder, TileStore(tiles.images[rows]), engine), whole[rows])


@pytest.mark.parametrize(("side", "expected"), [(16, 512), (32, 128), (64, 32), (224, 16), (512, 16)])
def test_a_pass_on_a_cpu_is_bounded_in_pixels(side, expected):
    assert pass_size(512, side, torch.device("cpu")) == expected
    assert pass_size(8, side, torch.device("cpu")) == 8
    assert pass_size(512, side, torch.device("cuda")) == 512

import numpy as np
import pytest
import torch
from sklearn.decomposition import dict_learning
from torchstain.torch.normalizers.macenko import TorchMacenkoNormalizer

from its2clr.cohort.slides import stain
from its2clr.cohort.slides.stain import TARGET, StainNormaliser, Stains
from its2clr.cohort.slides.vahadane import SPARSITY, sparse_concentrations, sparse_stains
from its2clr.errors import InputError

METHODS = ("macenko", "vahadane")
SLIDE = Stains((0.75, 0.60, 0.28), (0.12, 0.95, 0.29), (1.4, 1.0))


def unit(vector):
    return np.array(vector) / np.linalg.norm(vector)


def concentrations(n, seed=0):
    """Pixels of mostly one stain, as nuclei and stroma are."""
    rng = np.random.default_rng(seed)
    mostly = rng.random(n) < 0.4
    strong, weak = rng.gamma(4.0, 0.18, n) + 0.1, rng.gamma(1.0, 0.05, n)
    return np.stack([np.where(mostly, strong, weak), np.where(mostly, weak, strong)], 1)


def tiles_of(stains, count=4, side=64, seed=0, white=255.0):
    """Tiles drawn with known stains, (N, 3, S, S) uint8."""
    matrix = np.stack([unit(stains.haematoxylin), unit(stains.eosin)])
    density = concentrations(count * side * side, seed) @ matrix
    pixels = np.clip(np.rint(white * np.exp(-density)), 0, 255).astype(np.uint8)
    return torch.from_numpy(pixels.reshape(count, side, side, 3)).permute(0, 3, 1, 2).contiguous()


def angle(first, second):
    return np.degrees(np.arccos(np.clip(unit(first) @ unit(second), -1, 1)))


def difference(first, second):
    return float((first.float() - second.float()).abs().mean())


class TestLasso:
    def test_equals_coordinate_descent_pixel_by_pixel(self):
        rng = np.random.default_rng(0)
        colours = np.stack([unit([0.7, 0.6, 0.3]), unit([0.2, 0.9, 0.4])], 1)
        densities = rng.uniform(0, 1.5, (200, 3))
        expected = []
        for density in densities:
            h = np.zeros(2)
            for _ in range(500):
                for j in range(2):
                    rest = density - colours[:, 1 - j] * h[1 - j]
                    h[j] = max(0.0, colours[:, j] @ rest - 0.1)
            expected.append(h)
        found = sparse_concentrations(torch.from_numpy(densities.T), torch.from_numpy(colours), 0.1).numpy().T
        np.testing.assert_allclose(found, expected, atol=1e-9)
        zeros = (np.array(expected) == 0).sum(0)
        assert zeros.min() > 0  # both borders were met

    def test_nothing_below_the_penalty(self):
        colours = torch.from_numpy(np.stack([unit([0.7, 0.6, 0.3]), unit([0.2, 0.9, 0.4])], 1))
        assert not sparse_concentrations(torch.zeros(3, 5, dtype=torch.float64), colours).any()
        assert not sparse_concentrations(-torch.ones(3, 5, dtype=torch.float64), colours).any()


class TestStains:
    def objective(self, densities, matrix):
        h = sparse_concentrations(torch.from_numpy(densities.T), torch.from_numpy(matrix)).numpy().T
        return 0.5 * ((densities - h @ matrix.T) ** 2).sum() + SPARSITY * h.sum()

    def test_agrees_with_scikit_learn(self):
        rng = np.random.default_rng(1)
        truth = np.stack([unit(SLIDE.haematoxylin), unit(SLIDE.eosin)])
        densities = np.clip(concentrations(1500, 1) @ truth + rng.normal(0, 0.02, (1500, 3)), 0, None)
        start = TARGET.matrix(torch.zeros(1)).double()
        ours = sparse_stains(torch.from_numpy(densities.T), start).numpy()
        code = sparse_concentrations(torch.from_numpy(densities.T), start / start.norm(dim=0)).numpy().T
        _, theirs, _ = dict_learning(
            densities,
            2,
            alpha=SPARSITY,
            max_iter=300,
            tol=1e-9,
            method="cd",
            dict_init=start.T.numpy(),
            code_init=code,
            positive_dict=True,
            positive_code=True,
            random_state=0,
        )
        theirs = theirs[np.argsort(-theirs[:, 0])].T  # haematoxylin first
        assert self.objective(densities, ours) <= self.objective(densities, theirs) * (1 + 1e-6)
        for stain_number in range(2):
            assert angle(ours[:, stain_number], theirs[:, stain_number]) < 0.5

    def test_the_start_does_not_matter(self):
        density = torch.from_numpy(concentrations(3000, 2) @ np.stack([unit(SLIDE.haematoxylin), unit(SLIDE.eosin)])).T
        starts = [TARGET.matrix(density).double(), torch.eye(3, dtype=torch.float64)[:, :2]]
        first, second = (sparse_stains(density, start) for start in starts)
        torch.testing.assert_close(first, second, atol=1e-3, rtol=0)

    @pytest.mark.parametrize("method", METHODS)
    def test_known_stains_are_found(self, method):
        normaliser = StainNormaliser(method)
        found = normaliser.fit(tiles_of(SLIDE, white=stain._WHITE[method]))
        assert normaliser.note == ""
        assert angle(found.haematoxylin, SLIDE.haematoxylin) < 4
        assert angle(found.eosin, SLIDE.eosin) < 4
        drawn = concentrations(4 * 64 * 64)
        density = drawn @ np.stack([unit(SLIDE.haematoxylin), unit(SLIDE.eosin)])
        tissue = (density.min(1) if method == "macenko" else density.mean(1)) >= 0.15
        np.testing.assert_allclose(found.maxima, np.quantile(drawn[tissue], 0.99, axis=0), rtol=0.1)

    @pytest.mark.parametrize("method", METHODS)
    def test_sampling_is_deterministic(self, method, monkeypatch):
        monkeypatch.setattr(stain, "_SAMPLED_PIXELS", 4000)
        tiles = tiles_of(SLIDE)
        whole = StainNormaliser(method)
        assert whole.fit(tiles) == StainNormaliser(method).fit(tiles.clone())


class TestNormaliser:
    @pytest.mark.parametrize("method", METHODS)
    def test_the_target_is_reached(self, method):
        tiles = tiles_of(SLIDE)
        normaliser = StainNormaliser(method)
        normaliser.fit(tiles)
        moved = normaliser.apply(tiles)
        assert (moved.dtype, moved.shape) == (torch.uint8, tiles.shape)
        reached = StainNormaliser(method).fit(moved)
        assert angle(reached.haematoxylin, TARGET.haematoxylin) < 3
        assert angle(reached.eosin, TARGET.eosin) < 3
        np.testing.assert_allclose(reached.maxima, TARGET.maxima, rtol=0.1)

    @pytest.mark.parametrize("method", METHODS)
    def test_twice_changes_little(self, method):
        tiles = tiles_of(SLIDE)
        normaliser = StainNormaliser(method)
        normaliser.fit(tiles)
        once = normaliser.apply(tiles)
        again = StainNormaliser(method)
        again.fit(once)
        assert difference(tiles, once) > 15
        assert difference(once, again.apply(once)) < 4

    @pytest.mark.parametrize(("method", "share"), [("macenko", 0.6), ("vahadane", 0.2)])
    def test_two_scanners_come_to_look_alike(self, method, share):
        # Macenko's estimate passes over pixels without red density, so the nearly pure eosin of SLIDE is harder for it
        other = Stains((0.60, 0.70, 0.40), (0.25, 0.85, 0.45), (1, 1))
        first, second = tiles_of(SLIDE), tiles_of(other)  # the same tissue
        moved = []
        for tiles in (first, second):
            normaliser = StainNormaliser(method)
            normaliser.fit(tiles)
            moved.append(normaliser.apply(tiles))
        assert difference(*moved) < share * difference(first, second)

    def test_macenko_equals_torchstain(self):
        tiles = tiles_of(TARGET, count=1, side=128, white=220.0)  # no glass: torchstain and we see the same pixels
        theirs, _, _ = TorchMacenkoNormalizer().normalize(tiles[0], stains=False)
        normaliser = StainNormaliser("macenko")
        normaliser.fit(tiles)
        ours = normaliser.apply(tiles)[0].permute(1, 2, 0).int()
        pixels = tiles[0].permute(1, 2, 0)
        assert difference(theirs, pixels.int()) > 3
        assert difference(ours, theirs) < 1.5

    def test_white_stays_white(self):
        tiles = tiles_of(SLIDE)
        tiles[:, :, :32] = 255
        normaliser = StainNormaliser("vahadane")
        normaliser.fit(tiles)
        assert int(normaliser.apply(tiles)[:, :, :32].min()) >= 254

    @pytest.mark.parametrize("method", METHODS)
    def test_tiles_do_not_depend_on_their_batch(self, method, monkeypatch):
        tiles = tiles_of(SLIDE, count=5, side=32)
        normaliser = StainNormaliser(method)
        normaliser.fit(tiles)
        whole = normaliser.apply(tiles)
        monkeypatch.setattr(stain, "_TILES_AT_ONCE", {"cpu": 2})
        assert int((normaliser.apply(tiles).int() - whole.int()).abs().max()) <= 1
        assert normaliser.apply(tiles[:0]).shape == (0, 3, 32, 32)

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize(
        ("fill", "note"),
        [
            ("white", "too little tissue"),
            ("black", "left as it is"),
            ("flat", "left as it is"),
            ("grey", "left as it is"),
        ],
    )
    def test_slides_without_two_stains_are_left_alone(self, method, fill, note):
        tiles = torch.full((2, 3, 64, 64), {"white": 250, "black": 0}.get(fill, 128), dtype=torch.uint8)
        if fill == "flat":
            tiles[:, 0] = 200
        if fill == "grey":
            tiles[:] = torch.randint(40, 200, (2, 1, 64, 64), generator=torch.Generator().manual_seed(0))
        normaliser = StainNormaliser(method)
        assert normaliser.fit(tiles) is None
        assert note in normaliser.note
        assert torch.equal(normaliser.apply(tiles), tiles)

    def test_a_new_fit_forgets_the_last(self):
        normaliser = StainNormaliser("macenko")
        normaliser.fit(tiles_of(SLIDE))
        assert normaliser.fit(torch.full((1, 3, 64, 64), 255, dtype=torch.uint8)) is None
        assert normaliser.stains is None

    def test_errors(self):
        with pytest.raises(InputError, match="macenko, vahadane"):
            StainNormaliser("reinhard")
        with pytest.raises(InputError, match="uint8"):
            StainNormaliser("macenko").fit(torch.zeros(1, 3, 8, 8))
        with pytest.raises(InputError, match="fit"):
            StainNormaliser("macenko").apply(tiles_of(SLIDE))

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    @pytest.mark.parametrize("method", METHODS)
    def test_a_gpu_gives_the_same(self, method):
        tiles = tiles_of(SLIDE)
        here, there = StainNormaliser(method), StainNormaliser(method)
        here.fit(tiles)
        there.fit(tiles.cuda())
        moved = there.apply(tiles.cuda())
        assert moved.is_cuda
        assert int((moved.cpu().int() - here.apply(tiles).int()).abs().max()) <= 2

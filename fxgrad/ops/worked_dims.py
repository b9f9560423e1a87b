"""Which dims of its operands an op works over, for ops that treat every slice along the other dims alone."""

from __future__ import annotations

EVERY = ""  # all operands that are not named

_MATRICES = """cholesky cholesky_inverse cholesky_solve linalg_cholesky linalg_cholesky_ex logdet det linalg_det
    _linalg_det slogdet linalg_slogdet _linalg_slogdet inverse linalg_inv linalg_inv_ex linalg_eig linalg_eigvals
    _linalg_eigvals linalg_eigh linalg_eigvalsh _linalg_eigh linalg_matrix_power matrix_power matrix_exp
    linalg_matrix_exp linalg_qr qr geqrf linalg_svd svd _linalg_svd linalg_svdvals linalg_lu linalg_lu_factor
    linalg_lu_factor_ex lu _lu_with_info linalg_cond linalg_matrix_rank linalg_solve linalg_solve_ex _linalg_solve_ex
    linalg_solve_triangular triangular_solve linalg_lstsq max_pool2d_with_indices_backward max_unpool2d""".split()

# how many of their last dims ops work over
OVER_LAST: dict[str, dict[str, int]] = {
    **{name: {EVERY: 2} for name in _MATRICES},
    "pinverse": {EVERY: 2},
    "linalg_pinv": {"input": 2, "A": 2, "atol": 0, "rtol": 0, "rcond": 0},
    "linalg_householder_product": {"input": 2, "tau": 1},
    "ormqr": {"input": 2, "input2": 1, "input3": 2},
    "lu_unpack": {"LU_data": 2, "LU_pivots": 1},
    "lu_solve": {"input": 2, "LU_data": 2, "LU_pivots": 1},
    "linalg_lu_solve": {"LU": 2, "pivots": 1, "B": 2},
    "linalg_vander": {EVERY: 0},  # each element: its powers are a new last dim
    "pairwise_distance": {EVERY: 1},
    "view_as_complex": {EVERY: 1},
    "view_as_real": {EVERY: 0},
    "stft": {EVERY: 1},
    "max_unpool1d": {EVERY: 1},
    "max_unpool3d": {EVERY: 3},
    "fractional_max_pool2d": {"input": 2, "_random_samples": 1, "random_samples": 1},
    "fractional_max_pool3d": {"input": 3, "_random_samples": 1, "random_samples": 1},
    # losses without a reduction
    "triplet_margin_loss": {EVERY: 1},
    "multilabel_margin_loss": {EVERY: 1},
    "multilabel_soft_margin_loss": {EVERY: 1},
    "multi_margin_loss": {"input": 1, "weight": 1, "target": 0},
    "cosine_embedding_loss": {"input1": 1, "input2": 1, "target": 0},
}

# ops that name their dims and keep them: where they name none, so many last ones (None: as many as `s` has, else all)
OVER_NAMED: dict[str, int | None] = {
    **dict.fromkeys((f"fft_{kind}" for kind in "fft ifft rfft irfft hfft ihfft".split()), 1),
    **dict.fromkeys((f"fft_{kind}" for kind in "fft2 ifft2 rfft2 irfft2 hfft2 ihfft2".split()), 2),
    **dict.fromkeys((f"fft_{kind}" for kind in "fftn ifftn rfftn irfftn hfftn ihfftn".split()), None),
    **dict.fromkeys(("fft_fftshift", "fft_ifftshift"), None),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), 1),
}

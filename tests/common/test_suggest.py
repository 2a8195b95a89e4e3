from ladder_residual.common.suggest import did_you_mean


def test_the_nearest_names_or_nothing():
    assert did_you_mean("laddr", ["standard", "ladder"]) == " (did you mean 'ladder'?)"
    assert did_you_mean("LADDER", ["ladder"]) == " (did you mean 'ladder'?)"
    assert did_you_mean("desync", ["desync-2x", "desync-4x"]) in (
        " (did you mean 'desync-2x' or 'desync-4x'?)",
        " (did you mean 'desync-4x' or 'desync-2x'?)",
    )
    assert did_you_mean(None, ["ladder"]) == ""
    assert did_you_mean("abacus", []) == ""

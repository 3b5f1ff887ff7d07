"""A campaign of random faults, small enough for every test run."""

from ntp.testing import campaign


def test_ten_random_faults_change_no_bit(capsys):
    failed = campaign.main(["--faults", "10", "--seed", "68"])
    told = capsys.readouterr().out
    assert failed == 0, told
    assert "0 failures" in told

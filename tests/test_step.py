"""Step: packing, positions, masks."""
import numpy as np

from qwentin.step import Rows, ancestors, chain, depths, pack

TREE = np.array([-1, 0, 0, 2], np.int32)


def test_the_picture_in_the_docstring():
    none = np.zeros(0, np.int32)
    step = pack([
        Rows(np.array([5, 9, 2]), slot=3, pages=np.array([7, 8]), length=100, outputs=np.array([2])),
        Rows(np.array([7]), slot=1, pages=np.array([4]), length=9, outputs=np.array([0])),
        Rows(np.array([3, 3, 8, 1]), slot=0, pages=np.array([5]), length=20, outputs=np.array([0, 3]), parents=TREE,
             commit=False, accepted=np.array([0, 2])),
    ])
    assert step.tokens.tolist() == [5, 9, 2, 7, 3, 3, 8, 1]
    assert step.parents.tolist() == [-1, 0, 1, -1, -1, 0, 0, 2]
    assert step.starts.tolist() == [0, 3, 4, 8]
    assert step.positions.tolist() == [100, 101, 102, 9, 22, 23, 23, 24], "accepted rows come before the tree's root"
    assert step.pages.tolist() == [[7, 8], [4, -1], [5, -1]]
    assert step.outputs.tolist() == [2, 3, 4, 7] and step.commit.tolist() == [True, True, False]
    assert [a.tolist() for a in step.accepted] == [none.tolist(), none.tolist(), [0, 2]]
    assert step.span(2) == slice(4, 8) and step.rows == 8 and step.sequences == 3


def test_masks():
    assert np.array_equal(ancestors(chain(4)), np.tril(np.ones((4, 4), bool)))
    assert ancestors(TREE).tolist() == [[True, False, False, False], [True, True, False, False],
                                        [True, False, True, False], [True, False, True, True]]
    assert depths(TREE).tolist() == [0, 1, 1, 2] and depths(chain(3)).tolist() == [0, 1, 2]

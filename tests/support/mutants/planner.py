"""Mutants of what goes where: one line each, the fastest to be noticed first."""

from __future__ import annotations

from .mutant import Mutant

__all__ = ["MUTANTS"]

# fmt: off
MUTANTS = [
    Mutant("tensors not aligned to their elements", "planner/image.py", 'np.argsort(np.where(nbytes % PAGE_NBYTES == 0, np.iinfo(np.int64).min, -itemsize), kind="stable")', 'np.argsort(np.where(nbytes % PAGE_NBYTES == 0, np.iinfo(np.int64).min, -nbytes), kind="stable")', "tests/unit/test_planner_image.py::test_pages_first_then_by_itemsize"),
    Mutant("images on the line touch each other", "planner/loading.py", '    room = -(-(hashed_end + gap_nbytes + 1) // chunk_nbytes) * chunk_nbytes\n', '    room = -(-hashed_end // chunk_nbytes) * chunk_nbytes\n', "tests/unit/test_planner_loading.py::test_gaps_are_not_bridged_between_images"),
    Mutant("reads past hashed_end", "planner/loading.py", '    stop = np.minimum(-(-run_stop // block_nbytes) * block_nbytes, pairs.end[run_pair])\n', '    stop = -(-run_stop // block_nbytes) * block_nbytes\n', "tests/unit/test_planner_loading.py::test_the_last_read_ends_with_the_hashed_part"),
    Mutant("ties of order are not settled by offsets: holders line up boxes differently", "planner/saving.py", '    return np.lexsort((*shared.offsets.T[::-1], order, group)).astype(np.int64, copy=False)\n', '    return np.lexsort((order, group)).astype(np.int64, copy=False)\n', "tests/unit/test_planner_saving.py::test_boxes_that_share_an_order_go_by_offset"),
    Mutant("bounds: offset + length not checked", "planner/coverage.py", '        fits &= (offset >= 0) & (length > 0) & (length <= limit - offset)\n', '        fits &= (offset >= 0) & (length > 0) & (length <= limit)\n', "tests/unit/test_planner_table.py::test_boxes_out_of_bounds_are_named"),
    Mutant("cut coverage: a gap at the far end passes", "planner/coverage.py", '    flags[groups.tensor[last & (reach < groups.highs[group, dim])]] = True\n', '', "tests/unit/test_planner_table.py::test_any_box_left_out_is_reported"),
    Mutant("pinwheels: volume alone decides", "planner/coverage.py", '    return all(count == 1 for _, _, count in _cells(region_low, region_high, low, high))\n', '    return True\n', "tests/unit/test_planner_table.py::test_only_what_no_plane_parts_is_counted_cell_by_cell"),
    Mutant("balance: poured into the least loaded only", "planner/balance.py", '    filled = int(np.flatnonzero(steps < levels)[-1])  # steps below their level are the first ones\n', '    filled = int(np.flatnonzero(steps < levels)[0])\n', "tests/unit/test_planner_balance.py::test_who_has_more_alone_writes_less_of_what_is_shared"),
    Mutant("flat coverage: overlaps pass", "planner/coverage.py", '    flags[tensor[1:][same & (start[1:] != stop[:-1])]] = True\n', '    flags[tensor[1:][same & (start[1:] > stop[:-1])]] = True\n', "tests/unit/test_planner_table.py::test_any_box_stored_again_is_reported"),
    Mutant("overlaps: one read too early", "planner/loading.py", '    first = np.searchsorted(stop, run_start, side="right").astype(np.int64, copy=False)\n', '    first = np.searchsorted(stop, run_start, side="left").astype(np.int64, copy=False)\n', "tests/property/test_planner_loading.py::test_any_layout_loads_into_any_other"),
    Mutant("uneven shares: end of the line lost", "planner/saving.py", '            cut[row] = int(total[row]) * cuts[int(index[row])] // SHARE_UNIT\n', '            cut[row] = int(total[row]) // SHARE_UNIT * cuts[int(index[row])]\n', "tests/property/test_planner_saving.py::test_holders_write_everything_once"),
]

"""Mutants of what goes where: one line each, the fastest to be noticed first."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = [
    Mutant(
        says="tensors not aligned to their elements",
        file="planner/image.py",
        old="    order = np.argsort(np.where(nbytes % PAGE_NBYTES == 0, np.iinfo(np.int64).min, -itemsize), kind='stable')\n",
        new="    order = np.argsort(np.where(nbytes % PAGE_NBYTES == 0, np.iinfo(np.int64).min, -nbytes), kind='stable')\n",
        tests="tests/property/test_planner_image.py::test_shards_are_aligned_and_leave_no_holes",
    ),
    Mutant(
        says="images on the line touch each other",
        file="planner/loading.py",
        old="    room = round_up(hashed_end + gap_nbytes + 1, chunk_nbytes)\n",
        new="    room = round_up(hashed_end, chunk_nbytes)\n",
        tests="tests/property/test_planner_loading.py::test_gaps_are_not_bridged_between_images",
    ),
    Mutant(
        says="reads past hashed_end",
        file="planner/loading.py",
        old="    stop = np.minimum(round_up(run_stop, block_nbytes), pairs.end[run_pair])\n",
        new="    stop = round_up(run_stop, block_nbytes)\n",
        tests="tests/property/test_planner_loading.py::test_any_layout_loads_into_any_other",
    ),
    Mutant(
        says="ties of order are not settled by offsets: holders line up boxes differently",
        file="planner/saving.py",
        old="    return np.lexsort((*shared.offsets.T[::-1], order, group)).astype(np.int64, copy=False)\n",
        new="    return np.lexsort((order, group)).astype(np.int64, copy=False)\n",
        tests="tests/property/test_planner_saving.py::test_boxes_that_share_an_order_go_by_offset",
    ),
    Mutant(
        says="bounds: offset + length not checked",
        file="planner/coverage.py",
        old="        fits &= (offset >= 0) & (length > 0) & (length <= limit - offset)\n",
        new="        fits &= (offset >= 0) & (length > 0) & (length <= limit)\n",
        tests="tests/property/test_planner_coverage.py::test_boxes_out_of_bounds_are_named",
    ),
    Mutant(
        says="cut coverage: a gap at the far end passes",
        file="planner/coverage.py",
        old="    flags[groups.tensor[last & (reach < groups.highs[group, dim])]] = True\n",
        new="",
        tests="tests/property/test_planner_coverage.py::test_tables_are_judged_tensor_by_tensor",
    ),
    Mutant(
        says="pinwheels: volume alone decides",
        file="planner/coverage.py",
        old="    return all((count == 1 for _, _, count in cells(region_low, region_high, low, high)))\n",
        new="    return True\n",
        tests="tests/property/test_planner_coverage.py::test_only_what_no_plane_parts_is_counted_cell_by_cell",
    ),
    Mutant(
        says="balance: poured into the least loaded only",
        file="planner/balance.py",
        old="    parts: Loads = np.maximum(levels.min() - loads, 0.0)\n",
        new="    parts: Loads = np.maximum(levels[0] - loads, 0.0)\n",
        tests="tests/property/test_planner_saving.py::test_shares_are_as_even_as_holders_allow",
    ),
    Mutant(
        says="flat coverage: overlaps pass",
        file="planner/coverage.py",
        old="    flags[tensor[1:][same & (start[1:] != stop[:-1])]] = True\n",
        new="    flags[tensor[1:][same & (start[1:] > stop[:-1])]] = True\n",
        tests="tests/property/test_planner_coverage.py::test_tables_are_judged_tensor_by_tensor",
    ),
    Mutant(
        says="overlaps: one read too early",
        file="planner/loading.py",
        old="    first = np.searchsorted(stop, run_start, side='right').astype(np.int64, copy=False)\n",
        new="    first = np.searchsorted(stop, run_start, side='left').astype(np.int64, copy=False)\n",
        tests="tests/property/test_planner_loading.py::test_any_layout_loads_into_any_other",
    ),
    Mutant(
        says="uneven shares: end of the line lost",
        file="planner/saving.py",
        old="            cut[row] = int(total[row]) * cuts[int(index[row])] // SHARE_UNIT\n",
        new="            cut[row] = int(total[row]) // SHARE_UNIT * cuts[int(index[row])]\n",
        tests="tests/property/test_planner_saving.py::test_holders_write_everything_once",
    ),
]

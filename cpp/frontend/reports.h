// Reports about failures to the launcher, see src/shoal/failure_report.py.
#pragma once

#include <vector>

#include "engine/statistics.h"

namespace shoal::frontend_core {

// Report that this rank leaves a group; must be called before others are notified.
void report_left();
// Report that this rank was notified that `ranks`, of the first group, failed or left.
void report_told(const std::vector<int>& ranks);
// Reports the counters of this rank in a world, after `seconds` of it, for `shoal run --summary`.
void report_summary(const StatisticsValues& totals, double seconds);

}  // namespace shoal::frontend_core

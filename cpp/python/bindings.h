// Each file of the binding adds its part to the native module; module.cc calls them all.
//
// Types and docstrings for Python are in src/shoal/_core.pyi.
#pragma once

#include <nanobind/nanobind.h>

void bind_constant_override(nanobind::module_& m);
void bind_engine(nanobind::module_& m);
void bind_ending(nanobind::module_& m);
void bind_interrupt(nanobind::module_& m);
void bind_kernels(nanobind::module_& m);
void bind_mpi(nanobind::module_& m);
void bind_packed(nanobind::module_& m);
void bind_post(nanobind::module_& m);
void bind_record(nanobind::module_& m);
void bind_reducer(nanobind::module_& m);
void bind_shortcut(nanobind::module_& m);
void bind_source(nanobind::module_& m);
void bind_statistics(nanobind::module_& m);

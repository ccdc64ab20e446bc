# find_package(shoal) for C++ programs; `shoal config --cmake-dir` prints this directory.
#
# Targets:
#   shoal::core   process groups and futures: #include <shoal/shoal.h>
#   shoal::torch  the same for tensors, and DistributedDataParallel: #include <shoal/torch.h>.  It exists after
#                 find_package(Torch), and uses the libtorch that was found.
#
# The headers need C++17 or newer.
get_filename_component(SHOAL_ROOT "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)

include(CMakeFindDependencyMacro)
find_dependency(Threads)

if(NOT TARGET shoal::core)
  add_library(shoal::core STATIC IMPORTED)
  set_target_properties(shoal::core PROPERTIES
    IMPORTED_LOCATION "${SHOAL_ROOT}/lib/libshoal.a"
    IMPORTED_LINK_INTERFACE_LANGUAGES CXX
    INTERFACE_INCLUDE_DIRECTORIES "${SHOAL_ROOT}/include"
    INTERFACE_COMPILE_FEATURES cxx_std_17
    INTERFACE_LINK_LIBRARIES "Threads::Threads;${CMAKE_DL_LIBS};rt")
  # The Python that the program starts for its rendezvous, unless SHOAL_PYTHON names another one.
  get_filename_component(SHOAL_PYTHON_ROOT "${SHOAL_ROOT}/../../../.." ABSOLUTE)
  if(EXISTS "${SHOAL_PYTHON_ROOT}/bin/python3")
    set_property(TARGET shoal::core PROPERTY
      INTERFACE_COMPILE_DEFINITIONS "SHOAL_DEFAULT_PYTHON=\"${SHOAL_PYTHON_ROOT}/bin/python3\"")
  endif()
endif()

if(TARGET torch AND NOT TARGET shoal::torch)
  add_library(shoal::torch INTERFACE IMPORTED)
  set_target_properties(shoal::torch PROPERTIES INTERFACE_LINK_LIBRARIES "shoal::core;${TORCH_LIBRARIES}")
elseif("torch" IN_LIST shoal_FIND_COMPONENTS AND NOT TARGET torch)
  set(shoal_FOUND FALSE)
  set(shoal_NOT_FOUND_MESSAGE "shoal::torch needs libtorch: call find_package(Torch REQUIRED) before find_package(shoal)")
endif()

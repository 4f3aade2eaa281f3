// Names that Python shares with a library, told by the library itself: the loader compares them
// (`check_shared` in vtoken/kernels/build.py), so that no list of fields drifts from its twin.
//
//   VT_STRUCT(Name, FIELDS)      a struct, declared from a list `FIELDS(F)` of F(type, name)
//   VT_TELL_STRUCT(Name, FIELDS) "Name query:p8 count:i8 scale:f4", from the same list
//   VT_TELL_CALL(function)       " function/3", with its number of arguments
#pragma once

#include <string>
#include <type_traits>

namespace vt {

template <class T>
std::string tell_field(const char* name) {
  const char kind = std::is_floating_point_v<T> ? 'f' : std::is_integral_v<T> ? 'i' : 'p';
  return std::string(" ") + name + ":" + kind + std::to_string(sizeof(T));
}

template <class R, class... A>
std::string tell_call(const char* name, R (*)(A...)) {
  return std::string(" ") + name + "/" + std::to_string(sizeof...(A));
}

}  // namespace vt

#define VT_MEMBER(type, name) type name;
#define VT_TELL_MEMBER(type, name) +vt::tell_field<type>(#name)
#define VT_TELL_CALL(function) +vt::tell_call(#function, function)
#define VT_STRUCT(Name, FIELDS) struct Name { FIELDS(VT_MEMBER) }
#define VT_TELL_STRUCT(Name, FIELDS) std::string(#Name) FIELDS(VT_TELL_MEMBER) + "\n"

// Strings, numbers, dictionaries and errors of Foundation.
#pragma once
#include <map>
#include <string>

#include "objc.h"

namespace metal_sim {

const ClassObject& constant_string_class();  // of @"..." in the launcher's source

Object* new_string(const std::string& text);
std::string text_of(const Object* string);  // NSString, @"..." or NSNumber; throws Fault for anything else

// Answers nil, and the reason to a caller who wants it: what Metal's methods do.
Object* fail(Object** error, const std::string& text);

std::map<std::string, std::string> entries_of(const Object* dictionary);

}  // namespace metal_sim

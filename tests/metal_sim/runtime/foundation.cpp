#include "foundation.h"

#include "fault.h"

// Classes that the launcher names in its source are referred to by these symbols.
#define REFERABLE(name)             \
  extern "C" {                      \
  int __objc_class_name_##name = 0; \
  }
REFERABLE(NSObject)
REFERABLE(NSString)
REFERABLE(NSConstantString)
REFERABLE(NSNumber)
REFERABLE(NSDictionary)
REFERABLE(NSMutableDictionary)
REFERABLE(NSAutoreleasePool)

namespace metal_sim {
namespace {

using S = Selector;

// ---- NSString, NSNumber --------------------------------------------------------------------------------------------

struct ConstantString {  // laid out by the compiler
  const ClassObject* isa;
  const char* text;
  unsigned length;
};

struct String : Object {
  std::string text;
  explicit String(std::string t);
};

const char* utf8(Object* self) {
  if (self->isa == &constant_string_class()) return reinterpret_cast<ConstantString*>(self)->text;
  return static_cast<String*>(self)->text.c_str();
}
const Method string_methods[] = {
    method(
        "UTF8String", +[](Object* self, S*) { return utf8(self); }),
    method(
        "length", +[](Object* self, S*) { return uint64_t(text_of(self).size()); }),
    method(
        "isEqualToString:",
        +[](Object* self, S*, Object* other) -> signed char { return text_of(self) == text_of(other); }),
};

const ClassObject string_meta("NSString class",
                              {
                                  method(
                                      "stringWithUTF8String:",
                                      +[](Object*, S*, const char* text) { return autorelease(new String(text)); }),
                                  method(
                                      "alloc", +[](Object*, S*) -> Object* { return new String(""); }),
                              });
const ClassObject string_class("NSString", string_meta,
                               {
                                   string_methods[0],
                                   string_methods[1],
                                   string_methods[2],
                                   method(
                                       "initWithUTF8String:",
                                       +[](String* self, S*, const char* text) {
                                         self->text = text;
                                         return self;
                                       }),
                                   method(
                                       "initWithBytes:length:encoding:",
                                       +[](String* self, S*, const char* bytes, uint64_t length, uint64_t) {
                                         self->text.assign(bytes, length);
                                         return self;
                                       }),
                               });
String::String(std::string t) : Object(string_class), text(std::move(t)) {}

struct Number : Object {
  std::string text;
  explicit Number(std::string t);
};
template <typename T>
Method number_with(const char* selector) {
  return method(
      selector, +[](Object*, S*, T value) -> Object* { return autorelease(new Number(std::to_string(value))); });
}
const ClassObject number_meta("NSNumber class", {
                                                    number_with<signed char>("numberWithBool:"),
                                                    number_with<int>("numberWithInt:"),
                                                    number_with<unsigned>("numberWithUnsignedInt:"),
                                                    number_with<long>("numberWithLong:"),
                                                    number_with<unsigned long>("numberWithUnsignedLong:"),
                                                    number_with<long>("numberWithInteger:"),
                                                    number_with<unsigned long>("numberWithUnsignedInteger:"),
                                                    number_with<long long>("numberWithLongLong:"),
                                                    number_with<unsigned long long>("numberWithUnsignedLongLong:"),
                                                });
const ClassObject number_class("NSNumber", number_meta,
                               {
                                   method(
                                       "stringValue",
                                       +[](Number* self, S*) { return autorelease(new String(self->text)); }),
                               });
Number::Number(std::string t) : Object(number_class), text(std::move(t)) {}

// ---- NSDictionary --------------------------------------------------------------------------------------------------

struct Dictionary : Object {
  std::map<std::string, Object*> entries;
  Dictionary();
  void set(Object* value, Object* key) {
    if (!value) throw Fault("a dictionary was given nil for " + text_of(key));
    retain(value);
    Object*& entry = entries[text_of(key)];
    release(entry);
    entry = value;
  }
};

Object* lookup(Dictionary* self, S*, Object* key) {
  auto found = self->entries.find(text_of(key));
  return found == self->entries.end() ? nullptr : found->second;
}
void put(Dictionary* self, S*, Object* value, Object* key) { self->set(value, key); }

const ClassObject dictionary_meta("NSDictionary class",
                                  {
                                      method(
                                          "dictionaryWithObjects:forKeys:count:",
                                          +[](Object*, S*, Object** values, Object** keys, uint64_t n) {
                                            auto* d = new Dictionary;
                                            for (uint64_t i = 0; i < n; ++i) d->set(values[i], keys[i]);
                                            return autorelease(d);
                                          }),
                                      method(
                                          "dictionaryWithObject:forKey:",
                                          +[](Object*, S*, Object* value, Object* key) {
                                            auto* d = new Dictionary;
                                            d->set(value, key);
                                            return autorelease(d);
                                          }),
                                      method(
                                          "dictionary", +[](Object*, S*) { return autorelease(new Dictionary); }),
                                      method(
                                          "new", +[](Object*, S*) -> Object* { return new Dictionary; }),
                                  });
const ClassObject mutable_dictionary_class("NSMutableDictionary", dictionary_meta, {});
const ClassObject dictionary_class(
    "NSDictionary", dictionary_meta,
    {
        method(
            "count", +[](Dictionary* self, S*) { return uint64_t(self->entries.size()); }),
        method("objectForKey:", &lookup),
        method("objectForKeyedSubscript:", &lookup),
        method("setObject:forKey:", &put),
        method("setObject:forKeyedSubscript:", &put),
    },
    +[](Object* self) {
      for (auto& [_, value] : static_cast<Dictionary*>(self)->entries) release(value);
    });
Dictionary::Dictionary() : Object(dictionary_class) {}

// ---- NSError -------------------------------------------------------------------------------------------------------

struct Error : Object {
  std::string text;
  explicit Error(std::string t);
};
Object* description(Error* self, S*) { return autorelease(new String(self->text)); }
const ClassObject error_class("NSError", {
                                             method("localizedDescription", &description),
                                             method("description", &description),
                                             method(
                                                 "code", +[](Error*, S*) { return int64_t(1); }),
                                         });
Error::Error(std::string t) : Object(error_class), text(std::move(t)) {}

}  // namespace

const ClassObject& constant_string_class() {
  static const ClassObject& c = [&]() -> const ClassObject& {
    static ClassObject object("NSConstantString", string_meta,
                              {string_methods[0], string_methods[1], string_methods[2]});
    object.immortal = true;
    return object;
  }();
  return c;
}

Object* new_string(const std::string& text) { return new String(text); }

std::string text_of(const Object* object) {
  if (!object) throw Fault("a string was expected, not nil");
  if (object->isa == &constant_string_class()) return reinterpret_cast<const ConstantString*>(object)->text;
  if (object->isa == &string_class) return static_cast<const String*>(object)->text;
  if (object->isa == &number_class) return static_cast<const Number*>(object)->text;
  throw Fault("a string was expected, not an object of class " + object->isa->name);
}

Object* fail(Object** error, const std::string& text) {
  if (error) *error = autorelease(new Error(text));
  return nullptr;
}

std::map<std::string, std::string> entries_of(const Object* dictionary) {
  std::map<std::string, std::string> out;
  if (!dictionary) return out;
  if (dictionary->isa != &dictionary_class) throw Fault("a dictionary was expected, not " + dictionary->isa->name);
  for (auto& [key, value] : static_cast<const Dictionary*>(dictionary)->entries) out[key] = text_of(value);
  return out;
}

}  // namespace metal_sim

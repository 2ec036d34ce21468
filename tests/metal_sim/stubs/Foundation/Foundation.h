// Our own minimal declarations (not Apple's headers) of what PyTorch's MPS headers and a launcher name. A method added
// here needs its entry in runtime/foundation.cpp.
#pragma once
#import <dispatch/dispatch.h>
#import <objc/NSObject.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#define NS_ENUM(T, N) \
  enum N : T N;       \
  enum N : T
#define NS_OPTIONS(T, N) \
  enum N : T N;          \
  enum N : T
typedef NS_ENUM(NSUInteger, NSStringEncoding) { NSASCIIStringEncoding = 1, NSUTF8StringEncoding = 4 };
@interface NSString : NSObject <NSCopying>
+ (instancetype)stringWithUTF8String:(const char*)s;
- (instancetype)initWithUTF8String:(const char*)s;
- (instancetype)initWithBytes:(const void*)bytes length:(NSUInteger)length encoding:(NSStringEncoding)encoding;
- (BOOL)isEqualToString:(NSString*)other;
@property(readonly) const char* UTF8String;
@property(readonly) NSUInteger length;
@end
@interface NSConstantString : NSString {  // of @"...": laid out by the compiler
  const char* text;
  unsigned int count;
}
@end
@interface NSNumber : NSObject
+ (NSNumber*)numberWithBool:(BOOL)v;
+ (NSNumber*)numberWithInt:(int)v;
+ (NSNumber*)numberWithUnsignedInt:(unsigned int)v;
+ (NSNumber*)numberWithLong:(long)v;
+ (NSNumber*)numberWithUnsignedLong:(unsigned long)v;
+ (NSNumber*)numberWithInteger:(NSInteger)v;
+ (NSNumber*)numberWithUnsignedInteger:(NSUInteger)v;
+ (NSNumber*)numberWithLongLong:(long long)v;
+ (NSNumber*)numberWithUnsignedLongLong:(unsigned long long)v;
@property(readonly) NSString* stringValue;
@end
@interface NSDictionary<Key, Value> : NSObject <NSCopying>
+ (instancetype)dictionaryWithObjects:(const Value[])values forKeys:(const id<NSCopying>[])keys count:(NSUInteger)n;
+ (instancetype)dictionaryWithObject:(Value)value forKey:(id<NSCopying>)key;
+ (instancetype)dictionary;
- (Value)objectForKey:(Key)key;
- (Value)objectForKeyedSubscript:(Key)key;
@property(readonly) NSUInteger count;
@end
@interface NSMutableDictionary<Key, Value> : NSDictionary <Key, Value>
- (void)setObject:(Value)value forKey:(id<NSCopying>)key;
- (void)setObject:(Value)value forKeyedSubscript:(id<NSCopying>)key;
@end
@interface NSError : NSObject
@property(readonly) NSString* localizedDescription;
@property(readonly) NSInteger code;
@end

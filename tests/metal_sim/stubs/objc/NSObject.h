// Our own declarations of the Objective-C root class, without any Objective-C runtime's headers.
#pragma once
typedef struct objc_class* Class;
typedef signed char BOOL;
#define YES ((BOOL)1)
#define NO ((BOOL)0)
#define nil ((id)0)
typedef unsigned long NSUInteger;
typedef long NSInteger;
@protocol NSObject
- (id)retain;
- (oneway void)release;
- (id)autorelease;
- (NSUInteger)retainCount;
- (BOOL)respondsToSelector:(SEL)selector;
@end
@protocol NSCopying
@end
__attribute__((objc_root_class))
@interface NSObject<NSObject> {
  Class isa;
}
+ (id)alloc;
- (id)init;
+ (id)new;
@end
@interface NSAutoreleasePool : NSObject
- (void)drain;
@end

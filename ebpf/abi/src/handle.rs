//! Handles to live elements of mapped arrays.
//!
//! Programs and userspace both change an element, so there is never a Rust reference to it. A
//! handle is its address, with a method for each field that is safe to touch: fields that change
//! are reached by atomics, fields that stay constant while the element is in use are read.

/// Defines the handle `$Ref` to an element. Behind `atomic`: the fields that change, each with its
/// atomic type, and behind `constant`: those that do not. Each gets a method of its name.
macro_rules! handle {
    (
        $(#[$doc:meta])* $Ref:ident($Element:ty);
        atomic { $($(#[$atomic_doc:meta])* $atomic:ident: $Atomic:ty,)* }
        constant { $($(#[$constant_doc:meta])* $constant:ident: $Constant:ty,)* }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub struct $Ref(*mut $Element);

        // SAFETY: fields that change are accessed by atomics only, or under a rule of the type's
        // own that holds for other processes as well.
        unsafe impl Send for $Ref {}
        // SAFETY: as above.
        unsafe impl Sync for $Ref {}

        impl $Ref {
            /// Handle to the element at this address.
            ///
            /// # Safety
            /// `element` points to an element of the map and stays mapped as long as the result is
            /// used.
            #[inline(always)]
            pub const unsafe fn new(element: *mut $Element) -> Self {
                Self(element)
            }

            /// Pointer to the element.
            #[inline(always)]
            pub const fn as_ptr(self) -> *mut $Element {
                self.0
            }

            $(
                $(#[$atomic_doc])*
                #[inline(always)]
                pub fn $atomic(&self) -> &$Atomic {
                    // SAFETY: `new` promised a valid, aligned element; the field has the atomic's
                    // size and alignment, and both sides use atomics on it.
                    unsafe { <$Atomic>::from_ptr((&raw mut (*self.0).$atomic).cast()) }
                }
            )*

            $(
                $(#[$constant_doc])*
                #[inline(always)]
                pub fn $constant(&self) -> $Constant {
                    // SAFETY: `new` promised a valid element; the field is constant while the
                    // element is in use.
                    unsafe { (&raw const (*self.0).$constant).read() }
                }
            )*
        }
    };
}

pub(crate) use handle;

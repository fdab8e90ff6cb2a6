//! Descriptors that travel with a message.
//!
//! A message type that passes descriptors has a type parameter for them. A process holds it with
//! descriptors ([`OwnedFd`], or borrowed ones to send); in the serialised form a [`Slot`] stands in
//! the place of each. One traversal of the message's fields, its `try_map`, converts either form to
//! the other ([`maps_descriptors`]), so sender and receiver can't differ in the order, and decoding
//! fails when descriptors are missing.
use std::os::fd::{AsFd, OwnedFd};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// The place of a descriptor in a serialised message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(from = "Mark", into = "Mark")]
pub struct Slot;

/// Serialized form of a [`Slot`] with a descriptor. A unit would be `null`, which stands for a slot
/// without a descriptor.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Mark {
    Descriptor,
}

impl From<Mark> for Slot {
    fn from(_: Mark) -> Self {
        Self
    }
}

impl From<Slot> for Mark {
    fn from(_: Slot) -> Self {
        Self::Descriptor
    }
}

/// A message that can be sent.
pub trait Outbound: Sized {
    /// Serialised form of the message.
    type Wire: Serialize;
    /// Type of the descriptors that the message holds.
    type Descriptor: AsFd;

    /// Moves the descriptors to the end of `fds`, in the order of their slots.
    fn take_out(self, fds: &mut Vec<Self::Descriptor>) -> Self::Wire;
}

/// A message that can be received.
pub trait Inbound: Sized {
    /// Serialised form of the message.
    type Wire: DeserializeOwned;

    /// Puts descriptors back into their slots, in order.
    ///
    /// # Errors
    /// There are fewer descriptors than slots.
    fn put_back(
        wire: Self::Wire,
        fds: &mut dyn Iterator<Item = OwnedFd>,
    ) -> Result<Self, MissingDescriptor>;
}

/// Fewer descriptors came with a message than it has slots for.
#[derive(thiserror::Error, Clone, Copy, PartialEq, Eq, Debug)]
#[error("no descriptor came with it")]
pub struct MissingDescriptor;

/// Implements [`Outbound`] and [`Inbound`] for a message by its `try_map` ([`maps_descriptors`]).
macro_rules! carries_descriptors {
    ($Message:ident) => {
        impl<F: std::os::fd::AsFd> $crate::descriptors::Outbound for $Message<F> {
            type Wire = $Message<$crate::descriptors::Slot>;
            type Descriptor = F;

            fn take_out(self, fds: &mut Vec<F>) -> Self::Wire {
                let mut take = |fd| {
                    fds.push(fd);
                    Ok::<_, std::convert::Infallible>($crate::descriptors::Slot)
                };
                let Ok(wire) = self.try_map(&mut take);
                wire
            }
        }

        impl $crate::descriptors::Inbound for $Message<std::os::fd::OwnedFd> {
            type Wire = $Message<$crate::descriptors::Slot>;

            fn put_back(
                wire: Self::Wire,
                fds: &mut dyn Iterator<Item = std::os::fd::OwnedFd>,
            ) -> Result<Self, $crate::descriptors::MissingDescriptor> {
                wire.try_map(&mut |_| fds.next().ok_or($crate::descriptors::MissingDescriptor))
            }
        }
    };
}

/// Implements [`Outbound`] and [`Inbound`] for a message without descriptors.
macro_rules! carries_none {
    ($Message:ty) => {
        impl $crate::descriptors::Outbound for $Message {
            type Wire = Self;
            type Descriptor = std::os::fd::OwnedFd;

            fn take_out(self, _: &mut Vec<std::os::fd::OwnedFd>) -> Self {
                self
            }
        }

        impl $crate::descriptors::Inbound for $Message {
            type Wire = Self;

            fn put_back(
                wire: Self,
                _: &mut dyn Iterator<Item = std::os::fd::OwnedFd>,
            ) -> Result<Self, $crate::descriptors::MissingDescriptor> {
                Ok(wire)
            }
        }
    };
}

/// Implements `try_map<G, E>(self, f: &mut impl FnMut(F) -> Result<G, E>)` for a struct or an enum
/// whose type parameter is that of its descriptors. It names every field, and says of those that
/// hold descriptors how: `fd`, `optional`, `all` (of a `Vec`), `nested` (in another such type),
/// `boxed` (as nested, in a `Box`), `maybe` (as nested, in an `Option`), or `each` (as nested, in a
/// `Vec`).
macro_rules! maps_descriptors {
    (struct $Type:ident { $($field:ident $(: $kind:ident)?),* $(,)? }) => {
        impl<F> $Type<F> {
            pub(crate) fn try_map<G, E>(
                self,
                f: &mut impl FnMut(F) -> Result<G, E>,
            ) -> Result<$Type<G>, E> {
                let Self { $($field),* } = self;
                Ok($Type {
                    $($field: $crate::descriptors::map_field!(f $field $($kind)?)),*
                })
            }
        }
    };
    (enum $Type:ident { $(
        $Variant:ident
        $({ $($field:ident $(: $kind:ident)?),* })?
        $(($only:ident $(: $only_kind:ident)?))?
    ),* $(,)? }) => {
        impl<F> $Type<F> {
            pub(crate) fn try_map<G, E>(
                self,
                f: &mut impl FnMut(F) -> Result<G, E>,
            ) -> Result<$Type<G>, E> {
                Ok(match self { $(
                    Self::$Variant $({ $($field),* })? $(($only))? => $Type::$Variant
                        $({ $($field: $crate::descriptors::map_field!(f $field $($kind)?)),* })?
                        $(($crate::descriptors::map_field!(f $only $($only_kind)?)))?
                ),* })
            }
        }
    };
}

/// Maps one field for [`maps_descriptors`].
macro_rules! map_field {
    ($f:ident $field:ident) => {
        $field
    };
    ($f:ident $field:ident fd) => {
        $f($field)?
    };
    ($f:ident $field:ident optional) => {
        $field.map(&mut *$f).transpose()?
    };
    ($f:ident $field:ident all) => {
        $field.into_iter().map(&mut *$f).collect::<Result<_, _>>()?
    };
    ($f:ident $field:ident nested) => {
        $field.try_map($f)?
    };
    ($f:ident $field:ident boxed) => {
        Box::new($field.try_map($f)?)
    };
    ($f:ident $field:ident maybe) => {
        $field.map(|one| one.try_map($f)).transpose()?
    };
    ($f:ident $field:ident each) => {
        $field
            .into_iter()
            .map(|one| one.try_map($f))
            .collect::<Result<_, _>>()?
    };
}

pub(crate) use {carries_descriptors, carries_none, map_field, maps_descriptors};

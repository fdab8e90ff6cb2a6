//! Why inspected flows are ended, and how often they were.

macro_rules! refused {
    ($($(#[$doc:meta])* $Variant:ident $field:ident $text:literal,)+) => {
        /// Why an inspected flow was ended.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum InspectionRefusal { $($(#[$doc])* $Variant,)+ }

        /// Ended flows of a VM by reason.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
        pub struct RefusedCounts { $($(#[$doc])* pub $field: u64,)+ }

        impl InspectionRefusal {
            /// The name used in records.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$Variant => concat!("inspect_", stringify!($field)),)+ }
            }

            /// In words.
            pub const fn text(self) -> &'static str {
                match self { $(Self::$Variant => $text,)+ }
            }
        }

        impl RefusedCounts {
            /// Counts one.
            pub fn add(&mut self, why: InspectionRefusal) {
                match why { $(InspectionRefusal::$Variant => self.$field += 1,)+ }
            }

            /// Every reason in words, and how often.
            pub fn each(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$(($text, self.$field),)+].into_iter()
            }

            /// Every reason as a key, and how often.
            pub fn by_key(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($field), self.$field),)+].into_iter()
            }
        }
    };
}

refused! {
    /// It names a server that the rules do not let in, or not at this address.
    Name name "named a server that the rules do not let in at this address",
    /// It names no server, or an address.
    NoName no_name "named no server",
    /// The name is encrypted, or a decoy for one that is (ECH).
    Encrypted encrypted "hid the server's name (ECH)",
    /// Neither TLS nor HTTP, or over UDP not QUIC.
    Unknown unknown "spoke neither TLS, HTTP nor QUIC",
    /// It contradicts itself, or can be read in two ways.
    Malformed malformed "said what can be read in more than one way",
    /// A version, method or upgrade whose name could not be told.
    Unsupported unsupported "used what can't be held to its name (CONNECT, Upgrade, a version)",
    /// A TLS hello was not answered by TLS: whatever the server speaks, its name was not told in it.
    Unanswered unanswered "said TLS to a server that speaks something else",
    /// Packets of QUIC that nobody can open, again and again.
    Unopened unopened "sent QUIC packets that no key opens, again and again",
    /// More than is read before a name.
    TooLong too_long "said too much before a name",
    /// The server answered before it had all of a request, and the guest went on.
    Early early "went on with a request that its server had answered already",
    /// Nothing said for too long.
    Silent silent "said nothing",
    /// Not whole for too long.
    Slow slow "did not finish what it began to say",
    /// The server did not take what was sent.
    Untaken untaken "was not acknowledged by the server",
    /// The VM had as many inspected connections as it may, or as much of them held.
    Limit limit "came when too much was held for inspection",
    /// No session of it is known (any more).
    Lost lost "was inspected by an engine that is gone",
}

//! Reasons why inspected flows are ended, and their counts.

macro_rules! refused {
    ($($(#[$doc:meta])* $Variant:ident $field:ident $text:literal,)+) => {
        /// Reason why an inspected flow was ended.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum InspectionRefusal { $($(#[$doc])* $Variant,)+ }

        /// Numbers of a VM's ended flows, by reason.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
        pub struct RefusedCounts { $($(#[$doc])* pub $field: u64,)+ }

        impl InspectionRefusal {
            /// Returns the name used in records.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$Variant => concat!("inspect_", stringify!($field)),)+ }
            }

            /// Returns a description that completes a sentence about the flow.
            pub const fn text(self) -> &'static str {
                match self { $(Self::$Variant => $text,)+ }
            }
        }

        impl RefusedCounts {
            /// Counts one ended flow.
            pub fn add(&mut self, why: InspectionRefusal) {
                match why { $(InspectionRefusal::$Variant => self.$field += 1,)+ }
            }

            /// Returns the description and the count of every reason.
            pub fn each(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$(($text, self.$field),)+].into_iter()
            }

            /// Returns the key and the count of every reason.
            pub fn by_key(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($field), self.$field),)+].into_iter()
            }
        }
    };
}

refused! {
    /// The flow names a server that no rule admits at this address.
    Name name "named a server that the rules do not let in at this address",
    /// The flow names no server, or an address in place of a name.
    NoName no_name "named no server",
    /// The server name is encrypted, or is the public name of an encrypted hello (ECH).
    Encrypted encrypted "hid the server's name (ECH)",
    /// The content is neither TLS nor HTTP, or over UDP not QUIC.
    Unknown unknown "spoke neither TLS, HTTP nor QUIC",
    /// The content is inconsistent, or servers could interpret it in different ways.
    Malformed malformed "sent data that can be read in more than one way",
    /// The content uses a version, method or upgrade after which the server name cannot be
    /// determined.
    Unsupported unsupported "used a feature that escapes the check of names (CONNECT, Upgrade, a version)",
    /// The server did not answer a TLS hello by TLS, so the name that it reads may be elsewhere in
    /// the stream.
    Unanswered unanswered "said TLS to a server that speaks something else",
    /// The flow repeatedly sent QUIC packets that no key opens.
    Unopened unopened "sent QUIC packets that no key opens, again and again",
    /// A hello, head or chunk is longer than the inspection reads.
    TooLong too_long "said too much before a name",
    /// The server answered before it had the whole request, and the guest sent more.
    Early early "went on with a request that its server had answered already",
    /// Nothing was sent within the time limit.
    Silent silent "said nothing",
    /// The guest did not complete a message within the time limit.
    Slow slow "did not finish a message in time",
    /// The server did not acknowledge the data sent to it.
    Untaken untaken "was not acknowledged by the server",
    /// The VM reached its limit of inspected connections, or of memory for them.
    Limit limit "came when too much was held for inspection",
    /// The flow has no session: the engine that inspected it has ended.
    Lost lost "was inspected by an engine that is gone",
}

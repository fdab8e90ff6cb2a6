//! Messages of clients, and the options of both sides (RFC 8415 sections 8 and 21).
use std::net::Ipv6Addr;

/// Most associations in a message. A client needs one for each interface of the link.
pub const MAX_ASSOCIATIONS: usize = 8;
/// Most addresses in all associations of a message.
pub const MAX_ADDRESSES: usize = 16;
/// Longest DUID, bytes (RFC 8415 section 11.1).
const MAX_DUID_LEN: usize = 130;

/// Types of clients' messages (RFC 8415 section 7.3).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Solicit = 1,
    Request = 3,
    Confirm = 4,
    Renew = 5,
    Rebind = 6,
    Release = 8,
    Decline = 9,
    InformationRequest = 11,
}

impl Kind {
    fn of(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::Solicit,
            3 => Self::Request,
            4 => Self::Confirm,
            5 => Self::Renew,
            6 => Self::Rebind,
            8 => Self::Release,
            9 => Self::Decline,
            11 => Self::InformationRequest,
            _ => return None,
        })
    }
}

/// Types of the server's messages.
pub(super) mod reply_kind {
    pub(in super::super) const ADVERTISE: u8 = 2;
    pub(in super::super) const REPLY: u8 = 7;
}

/// Codes of options.
pub(super) mod code {
    pub(in super::super) const CLIENT_ID: u16 = 1;
    pub(in super::super) const SERVER_ID: u16 = 2;
    pub(in super::super) const IA_NA: u16 = 3;
    pub(in super::super) const IA_TA: u16 = 4;
    pub(in super::super) const IA_ADDRESS: u16 = 5;
    pub(in super::super) const REQUESTED: u16 = 6;
    pub(in super::super) const PREFERENCE: u16 = 7;
    pub(in super::super) const STATUS: u16 = 13;
    pub(in super::super) const RAPID_COMMIT: u16 = 14;
    /// RFC 3646 section 3.
    pub(in super::super) const RESOLVERS: u16 = 23;
    pub(in super::super) const IA_PD: u16 = 25;
    pub(in super::super) const REFRESH_TIME: u16 = 32;
}

/// Identity association of a client: for addresses that stay (IA_NA), for temporary ones (IA_TA), or
/// for prefixes (IA_PD).
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Association {
    /// Code of its option.
    pub(super) code: u16,
    /// The client's number for it.
    pub(super) id: [u8; 4],
    /// Addresses that it has or asks for.
    pub(super) addresses: Vec<Ipv6Addr>,
}

/// A message of a client.
#[derive(Debug)]
pub(super) struct Request<'p> {
    pub(super) kind: Kind,
    pub(super) transaction: [u8; 3],
    pub(super) client_id: Option<&'p [u8]>,
    pub(super) server_id: Option<&'p [u8]>,
    pub(super) associations: Vec<Association>,
    pub(super) has_rapid_commit: bool,
    /// Options that it asks for, two bytes each; `None` if it does not say.
    requested: Option<&'p [u8]>,
}

impl<'p> Request<'p> {
    /// Parses a message of a kind that clients send.
    pub(super) fn parse(message: &'p [u8]) -> Option<Self> {
        let [kind, a, b, c, options @ ..] = message else {
            return None;
        };
        let mut this = Self {
            kind: Kind::of(*kind)?,
            transaction: [*a, *b, *c],
            client_id: None,
            server_id: None,
            associations: Vec::new(),
            has_rapid_commit: false,
            requested: None,
        };
        for option in Options(options) {
            let (code, data) = option?;
            match code {
                code::CLIENT_ID => this.client_id = Some(data),
                code::SERVER_ID => this.server_id = Some(data),
                code::IA_NA | code::IA_TA | code::IA_PD => {
                    this.associations.push(association(code, data)?);
                }
                code::RAPID_COMMIT => this.has_rapid_commit = true,
                code::REQUESTED => this.requested = Some(data),
                _ => {}
            }
            if this.associations.len() > MAX_ASSOCIATIONS {
                return None;
            }
        }
        let is_sane = this
            .client_id
            .is_none_or(|id| (3..=MAX_DUID_LEN).contains(&id.len()));
        (is_sane && this.addresses().count() <= MAX_ADDRESSES).then_some(this)
    }

    /// All addresses in its associations.
    pub(super) fn addresses(&self) -> impl Iterator<Item = Ipv6Addr> {
        self.associations
            .iter()
            .flat_map(|it| &it.addresses)
            .copied()
    }

    pub(super) fn asks_for(&self, wanted: u16) -> bool {
        self.requested.is_none_or(|codes| {
            let mut codes = codes.chunks_exact(2);
            codes.any(|code| code == wanted.to_be_bytes())
        })
    }
}

fn association(code: u16, data: &[u8]) -> Option<Association> {
    let (id, rest) = data.split_first_chunk()?;
    // T1 and T2 are the server's to say.
    let options = match code {
        code::IA_TA => rest,
        _ => rest.get(8..)?,
    };
    let mut addresses = Vec::new();
    for option in Options(options) {
        let (inner, data) = option?;
        if code != code::IA_PD && inner == code::IA_ADDRESS {
            // Two lifetimes follow, which are the server's to say too.
            let address: [u8; 16] = *data.get(..24)?.first_chunk()?;
            addresses.push(address.into());
        }
    }
    Some(Association {
        code,
        id: *id,
        addresses,
    })
}

/// The options of a message or of an option, each with its code; `None` for one that is cut off, which
/// is the last.
struct Options<'p>(&'p [u8]);

impl<'p> Iterator for Options<'p> {
    type Item = Option<(u16, &'p [u8])>;

    fn next(&mut self) -> Option<Self::Item> {
        let rest = std::mem::take(&mut self.0);
        if rest.is_empty() {
            return None;
        }
        Some(split(rest).map(|(code, data, rest)| {
            self.0 = rest;
            (code, data)
        }))
    }
}

fn split(options: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let [k0, k1, l0, l1, after @ ..] = options else {
        return None;
    };
    let len = usize::from(u16::from_be_bytes([*l0, *l1]));
    let (data, rest) = after.split_at_checked(len)?;
    Some((u16::from_be_bytes([*k0, *k1]), data, rest))
}

/// Appends an option.
pub(super) fn put(message: &mut Vec<u8>, code: u16, data: &[u8]) {
    message.extend(code.to_be_bytes());
    message.extend((data.len() as u16).to_be_bytes());
    message.extend(data);
}

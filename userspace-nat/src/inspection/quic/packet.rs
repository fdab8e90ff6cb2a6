//! Parser of the QUIC packets in a datagram (RFC 9000 section 17).
use crate::inspection::{
    Refused,
    quic::{Version, keys::Keys},
};

/// Longest connection id, bytes (RFC 9000 section 17.2).
pub(super) const MAX_ID: usize = 20;

/// An Initial packet, protected; or another one with a long header, of which no more than the ids
/// are looked at.
#[derive(Clone, Copy, Debug)]
pub struct Initial<'d> {
    /// QUIC version of the packet.
    pub version: Version,
    /// Destination connection id of the packet.
    pub destination: &'d [u8],
    /// Source connection id of the packet.
    pub source: &'d [u8],
    /// The packet from its first byte on.
    packet: &'d [u8],
    /// Offset of the packet number.
    number_at: usize,
}

/// Initial packets of a datagram.
///
/// # Errors
/// If the packets cannot be separated: a server could find an Initial where none is looked for.
pub fn initials(datagram: &[u8]) -> Result<Vec<Initial<'_>>, Refused> {
    let packets = long_packets(datagram)?.into_iter();
    let initials = packets.filter_map(|(packet, is_initial)| is_initial.then_some(packet));
    Ok(initials.collect())
}

/// Packets with long headers, each with whether it is an Initial.
///
/// # Errors
/// If the packets cannot be separated.
pub(super) fn long_packets(datagram: &[u8]) -> Result<Vec<(Initial<'_>, bool)>, Refused> {
    let mut found = Vec::new();
    let mut rest = datagram;
    // One with a short header takes the rest, and is not the first of a connection.
    while rest.first().is_some_and(|first| first & 0x80 != 0) {
        let (packet, is_initial, after) = long(rest)?;
        found.push((packet, is_initial));
        rest = after;
    }
    Ok(found)
}

/// One packet with a long header, whether it is an Initial, and what follows it.
fn long(packet: &[u8]) -> Result<(Initial<'_>, bool, &[u8]), Refused> {
    let mut reader = Reader {
        bytes: packet,
        at: 0,
    };
    let first = reader.take(1)?[0];
    let version = reader.take(4)?;
    let version = u32::from_be_bytes([version[0], version[1], version[2], version[3]]);
    let version = Version::parse(version).ok_or(Refused::Unsupported)?;
    let destination = reader.id()?;
    let source = reader.id()?;
    let kind = (first >> 4) & 3;
    let (initial, retry) = match version {
        Version::One => (0, 3),
        Version::Two => (1, 0),
    };
    if kind == retry {
        // A server's, and alone.
        return Err(Refused::Malformed);
    }
    if kind == initial {
        let token = reader.length()?;
        reader.take(token)?;
    }
    let len = reader.length()?;
    let number_at = reader.at;
    reader.take(len)?;
    let (packet, after) = packet.split_at(reader.at);
    let found = Initial {
        version,
        destination,
        source,
        packet,
        number_at,
    };
    Ok((found, kind == initial, after))
}

impl Initial<'_> {
    /// Frames of the packet; `None` if it is not protected by these keys.
    pub fn open(&self, keys: &Keys) -> Option<Vec<u8>> {
        // The sample is taken as if the number had four bytes.
        let sample = self.packet.get(self.number_at + 4..)?.first_chunk()?;
        let mask = keys.mask(*sample);
        let first = self.packet[0] ^ (mask[0] & 0x0f);
        let number_len = usize::from(first & 3) + 1;
        let mut header = self.packet[..self.number_at + number_len].to_vec();
        header[0] = first;
        let mut number = 0;
        for (byte, mask) in header[self.number_at..].iter_mut().zip(&mask[1..]) {
            *byte ^= mask;
            number = number << 8 | u64::from(*byte);
        }
        // Initials are few: the number is whole in its field.
        keys.open(number, &header, &self.packet[header.len()..])
    }
}

/// CRYPTO frames in an Initial packet's payload: offset and bytes. Other frames that a client may
/// send there are skipped.
///
/// # Errors
/// If the payload has a frame that is not allowed there (RFC 9000 section 12.4), or is malformed.
pub fn crypto_frames(payload: &[u8]) -> Result<Vec<(u64, &[u8])>, Refused> {
    let mut reader = Reader {
        bytes: payload,
        at: 0,
    };
    let mut found = Vec::new();
    while reader.at < payload.len() {
        match reader.number()? {
            // PADDING, PING.
            0 | 1 => {}
            kind @ (2 | 3) => {
                reader.number()?;
                reader.number()?;
                let ranges = reader.number()?;
                reader.number()?;
                for _ in 0..ranges {
                    reader.number()?;
                    reader.number()?;
                }
                if kind == 3 {
                    for _ in 0..3 {
                        reader.number()?;
                    }
                }
            }
            6 => {
                let offset = reader.number()?;
                let len = reader.length()?;
                found.push((offset, reader.take(len)?));
            }
            // CONNECTION_CLOSE.
            0x1c => {
                reader.number()?;
                reader.number()?;
                let len = reader.length()?;
                reader.take(len)?;
            }
            _ => return Err(Refused::Malformed),
        }
    }
    Ok(found)
}

struct Reader<'b> {
    bytes: &'b [u8],
    at: usize,
}

impl<'b> Reader<'b> {
    fn take(&mut self, len: usize) -> Result<&'b [u8], Refused> {
        let end = self.at.checked_add(len).ok_or(Refused::Malformed)?;
        let taken = self.bytes.get(self.at..end).ok_or(Refused::Malformed)?;
        self.at = end;
        Ok(taken)
    }

    /// A variable-length integer (RFC 9000 section 16).
    fn number(&mut self) -> Result<u64, Refused> {
        let first = self.take(1)?[0];
        let mut number = u64::from(first & 0x3f);
        for byte in self.take((1 << (first >> 6)) - 1)? {
            number = number << 8 | u64::from(*byte);
        }
        Ok(number)
    }

    fn length(&mut self) -> Result<usize, Refused> {
        usize::try_from(self.number()?).map_err(|_| Refused::Malformed)
    }

    fn id(&mut self) -> Result<&'b [u8], Refused> {
        let len = usize::from(self.take(1)?[0]);
        if len > MAX_ID {
            return Err(Refused::Malformed);
        }
        self.take(len)
    }
}

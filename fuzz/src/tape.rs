//! Reader of an input from front to back. Beyond its end it reads zeroes, so every input is valid,
//! and a seed can be written as the same sequence.

use std::net::IpAddr;

use slipgate_abi::Protocol;
use slipgate_policy::Destination;

/// Reader of an input.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tape<'a>(&'a [u8]);

impl<'a> Tape<'a> {
    pub(crate) fn new(input: &'a [u8]) -> Self {
        Self(input)
    }

    /// Whether the input is used up.
    pub(crate) fn is_at_end(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn u8(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    pub(crate) fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.array())
    }

    pub(crate) fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let bytes = self.take(N);
        array[..bytes.len()].copy_from_slice(bytes);
        array
    }

    /// Reads at most `len` bytes.
    pub(crate) fn take(&mut self, len: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        bytes
    }

    /// Reads bytes that are preceded by their length (2).
    pub(crate) fn bytes(&mut self) -> &'a [u8] {
        let len = self.u16();
        self.take(usize::from(len))
    }

    /// Reads a destination: address (4), port (2), protocol (1), and with IPv6, which the upper bit
    /// of the protocol says, the other octets of the address (12).
    pub(crate) fn destination(&mut self) -> Destination {
        let (first, port, protocol) = (self.array::<4>(), self.u16(), self.u8());
        let addr = match protocol >> 7 {
            0 => IpAddr::from(first),
            _ => {
                let mut octets = [0; 16];
                octets[..4].copy_from_slice(&first);
                octets[4..].copy_from_slice(&self.array::<12>());
                octets.into()
            }
        };
        Destination {
            addr,
            port,
            protocol: [Protocol::Tcp, Protocol::Udp, Protocol::Icmp]
                [usize::from(protocol & 0x7f) % 3],
        }
    }

    /// Reads the rest of the input.
    pub(crate) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }
}

/// Returns bytes preceded by their length, in the form that [`Tape::bytes`] reads.
pub(crate) fn with_length(bytes: &[u8]) -> Vec<u8> {
    let len = u16::try_from(bytes.len()).expect("a seed is short");
    [&len.to_be_bytes()[..], bytes].concat()
}

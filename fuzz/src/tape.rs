//! An input read from front to back. What it ends short of is zero, so every input means something
//! and a seed can be written down as the same sequence.

/// A reader.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tape<'a>(&'a [u8]);

impl<'a> Tape<'a> {
    pub(crate) fn new(input: &'a [u8]) -> Self {
        Self(input)
    }

    /// Whether nothing is left.
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

    /// At most `len` bytes.
    pub(crate) fn take(&mut self, len: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        bytes
    }

    /// Bytes behind their length of two bytes.
    pub(crate) fn bytes(&mut self) -> &'a [u8] {
        let len = self.u16();
        self.take(usize::from(len))
    }

    /// All that is left.
    pub(crate) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }
}

/// Bytes behind their length, as [`Tape::bytes`] reads them.
pub(crate) fn with_length(bytes: &[u8]) -> Vec<u8> {
    let len = u16::try_from(bytes.len()).expect("a seed is short");
    [&len.to_be_bytes()[..], bytes].concat()
}

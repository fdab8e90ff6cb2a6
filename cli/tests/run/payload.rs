//! Kernels of a few instructions: ELF files with a PVH note, entered in 32-bit protected mode.

/// Where they are loaded and entered.
const ENTRY: u32 = 0x10_0000;
const FILE_OFFSET: usize = 0x1000;
/// The serial port's data register.
const SERIAL: u16 = 0x3f8;
/// The byte written here is the guest's exit status.
const EXIT: u16 = 0xf4;

/// Machine instructions, in order.
#[derive(Clone, Default)]
pub(crate) struct Payload(Vec<u8>);

impl Payload {
    /// Prints the text on the serial port.
    pub(crate) fn say(mut self, text: &str) -> Self {
        for byte in text.bytes() {
            self = self.out(SERIAL, byte);
        }
        self
    }

    /// `mov dx, PORT; mov al, BYTE; out dx, al`
    pub(crate) fn out(mut self, port: u16, byte: u8) -> Self {
        let [low, high] = port.to_le_bytes();
        self.0.extend([0x66, 0xba, low, high, 0xb0, byte, 0xee]);
        self
    }

    /// Ends with this status.
    pub(crate) fn exit(self, status: u8) -> Vec<u8> {
        self.out(EXIT, status).halt()
    }

    /// Waits for ever: `hlt`, again and again.
    pub(crate) fn halt(mut self) -> Vec<u8> {
        self.0.extend([0xf4, 0xeb, 0xfd]);
        self.build()
    }

    /// Computes for ever: a jump to itself.
    pub(crate) fn spin(mut self) -> Vec<u8> {
        self.0.extend([0xeb, 0xfe]);
        self.build()
    }

    /// An exception (`ud2`) with no handler for it, nor for what follows from that.
    pub(crate) fn crash(mut self) -> Vec<u8> {
        self.0.extend([0x0f, 0x0b]);
        self.build()
    }

    /// Prints what is typed, until a `q`, which is status 0.
    pub(crate) fn echo_until_q(mut self) -> Vec<u8> {
        self.0.extend([
            0x66, 0xba, 0xfd, 0x03, // again: mov dx, 0x3fd (line status)
            0xec, // in al, dx
            0xa8, 0x01, // test al, 1 (data ready)
            0x74, 0xf7, // jz again
            0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
            0xec, // in al, dx
            0xee, // out dx, al
            0x3c, b'q', // cmp al, 'q'
            0x75, 0xed, // jne again
        ]);
        self.exit(0)
    }

    /// ELF-64, one loadable segment, and the note XEN_ELFNOTE_PHYS32_ENTRY (18).
    fn build(self) -> Vec<u8> {
        const HEADER: usize = 64;
        const SEGMENT: usize = 56;
        let note_offset = (HEADER + 2 * SEGMENT) as u64;
        let mut note = Vec::new();
        for word in [4u32, 4, 18, u32::from_le_bytes(*b"Xen\0"), ENTRY] {
            note.extend(word.to_le_bytes());
        }
        let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
        file.extend([2, 0, 62, 0, 1, 0, 0, 0]); // an executable for x86-64, version 1
        for long in [u64::from(ENTRY), HEADER as u64, 0] {
            file.extend(long.to_le_bytes());
        }
        file.extend([0; 4]);
        for half in [HEADER as u16, SEGMENT as u16, 2, 0, 0, 0] {
            file.extend(half.to_le_bytes());
        }
        let length = self.0.len() as u64;
        for (kind, flags, offset, address, bytes) in [
            (1u32, 7u32, FILE_OFFSET as u64, u64::from(ENTRY), length),
            (4, 4, note_offset, 0, note.len() as u64),
        ] {
            file.extend(kind.to_le_bytes());
            file.extend(flags.to_le_bytes());
            for long in [offset, address, address, bytes, bytes, 4] {
                file.extend(long.to_le_bytes());
            }
        }
        file.extend(note);
        file.resize(FILE_OFFSET, 0);
        file.extend(self.0);
        file
    }
}

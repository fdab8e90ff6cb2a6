//! Guests of a few 32-bit instructions behind a PVH entry, assembled by hand.
#![allow(dead_code)] // Each test file uses its part.

/// Address at which the code is loaded and entered.
pub(crate) const ENTRY: u32 = 0x10_0000;

/// Code for 32-bit protected mode without paging, with flat segments and no IDT.
#[derive(Clone, Default)]
pub(crate) struct Code(Vec<u8>);

impl Code {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Appends the bytes of instructions.
    pub(crate) fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// Appends `mov dx, port; mov al, byte; out dx, al`.
    pub(crate) fn out(self, port: u16, byte: u8) -> Self {
        self.port(port).raw(&[0xb0, byte, 0xee])
    }

    /// Appends `mov edx, port`.
    pub(crate) fn port(self, port: u16) -> Self {
        self.raw(&[0xba]).raw(&u32::from(port).to_le_bytes())
    }

    /// Appends `mov eax, [address]`.
    pub(crate) fn load(self, address: u32) -> Self {
        self.raw(&[0xa1]).raw(&address.to_le_bytes())
    }

    /// Appends `mov eax, value`.
    pub(crate) fn eax(self, value: u32) -> Self {
        self.raw(&[0xb8]).raw(&value.to_le_bytes())
    }

    /// Appends `mov dword [address], value`.
    pub(crate) fn store(self, address: u32, value: u32) -> Self {
        self.raw(&[0xc7, 0x05])
            .raw(&address.to_le_bytes())
            .raw(&value.to_le_bytes())
    }

    /// Appends stores of code or data to an address, four bytes at a time.
    pub(crate) fn place(mut self, address: u32, bytes: &[u8]) -> Self {
        for (word, at) in bytes.chunks(4).zip((address..).step_by(4)) {
            let mut four = [0x90; 4];
            four[..word.len()].copy_from_slice(word);
            self = self.store(at, u32::from_le_bytes(four));
        }
        self
    }

    /// Appends an end of the machine: exit status 0 if EAX has this value, else 1.
    pub(crate) fn expect_eax(self, value: u32) -> Self {
        // cmp eax, value; setne al; mov edx, 0xf4; out dx, al
        self.raw(&[0x3d])
            .raw(&value.to_le_bytes())
            .raw(&[0x0f, 0x95, 0xc0])
            .port(0xf4)
            .raw(&[0xee])
    }

    /// Appends a wait until the byte at an address has a value.
    pub(crate) fn await_byte(self, address: u32, value: u8) -> Self {
        // again: pause; cmp byte [address], value; jne again
        self.raw(&[0xf3, 0x90, 0x80, 0x3d])
            .raw(&address.to_le_bytes())
            .raw(&[value, 0x75, 0xf5])
    }

    /// Appends a loop without end, `jmp $`.
    pub(crate) fn spin(self) -> Self {
        self.raw(&[0xeb, 0xfe])
    }

    /// Returns the address of the next instruction.
    pub(crate) fn here(&self) -> u32 {
        ENTRY + self.0.len() as u32
    }

    /// Returns an ELF image with a PVH note, which lives as long as the process.
    pub(crate) fn image(&self) -> &'static [u8] {
        const HEADERS: u64 = 64 + 2 * 56;
        const NOTE: u64 = 20;
        let mut elf = Vec::new();
        // e_ident: 64-bit, little endian; ET_EXEC, EM_X86_64.
        elf.extend(*b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
        elf.extend([2u16, 62].iter().flat_map(|v| v.to_le_bytes()));
        elf.extend(1u32.to_le_bytes());
        let offsets = [u64::from(ENTRY), 64, 0];
        elf.extend(offsets.iter().flat_map(|v| v.to_le_bytes()));
        elf.extend(0u32.to_le_bytes());
        elf.extend(
            [64u16, 56, 2, 64, 0, 0]
                .iter()
                .flat_map(|v| v.to_le_bytes()),
        );
        let size = self.0.len() as u64;
        let entry = u64::from(ENTRY);
        segment(&mut elf, 4, [HEADERS, 0, 0, NOTE, NOTE, 4]);
        segment(&mut elf, 1, [HEADERS + NOTE, entry, entry, size, size, 1]);
        // The note: sizes of name and value, XEN_ELFNOTE_PHYS32_ENTRY, name, value.
        elf.extend([4u32, 4, 18].iter().flat_map(|v| v.to_le_bytes()));
        elf.extend(*b"Xen\0");
        elf.extend(ENTRY.to_le_bytes());
        elf.extend(&self.0);
        elf.leak()
    }
}

/// Appends a program header with all permissions.
fn segment(elf: &mut Vec<u8>, kind: u32, rest: [u64; 6]) {
    elf.extend([kind, 7].iter().flat_map(|v| v.to_le_bytes()));
    elf.extend(rest.iter().flat_map(|v| v.to_le_bytes()));
}

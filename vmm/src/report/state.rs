//! Text form of a vCPU's registers.
use std::fmt;

use kvm_bindings::{kvm_dtable, kvm_segment};

use super::Registers;

/// RIP and CS selector after a reset or INIT (Intel SDM vol. 3, table 9-1).
const RESET_RIP: u64 = 0xfff0;
const RESET_CS: u16 = 0xf000;

impl Registers {
    /// Returns whether RIP and CS have their values after a reset.
    pub(super) fn are_of_a_reset(&self) -> bool {
        self.general.rip == RESET_RIP && self.special.cs.selector == RESET_CS
    }
}

impl fmt::Display for Registers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let g = &self.general;
        let s = &self.special;
        let rows: [[(&str, u64); 4]; 6] = [
            [
                ("rip", g.rip),
                ("rflags", g.rflags),
                ("rsp", g.rsp),
                ("rbp", g.rbp),
            ],
            [
                ("rax", g.rax),
                ("rbx", g.rbx),
                ("rcx", g.rcx),
                ("rdx", g.rdx),
            ],
            [("rsi", g.rsi), ("rdi", g.rdi), ("r8", g.r8), ("r9", g.r9)],
            [
                ("r10", g.r10),
                ("r11", g.r11),
                ("r12", g.r12),
                ("r13", g.r13),
            ],
            [
                ("r14", g.r14),
                ("r15", g.r15),
                ("cr0", s.cr0),
                ("cr2", s.cr2),
            ],
            [
                ("cr3", s.cr3),
                ("cr4", s.cr4),
                ("cr8", s.cr8),
                ("efer", s.efer),
            ],
        ];
        for row in rows {
            let mut gap = "";
            for (name, value) in row {
                write!(f, "{gap}{name:>6} {value:016x}")?;
                gap = " ";
            }
            writeln!(f)?;
        }
        for (name, segment) in [
            ("cs", &s.cs),
            ("ss", &s.ss),
            ("ds", &s.ds),
            ("es", &s.es),
            ("fs", &s.fs),
            ("gs", &s.gs),
            ("tr", &s.tr),
            ("ldt", &s.ldt),
        ] {
            writeln!(f, "{name:>6} {}", Segment(segment))?;
        }
        writeln!(f, "   gdt {}", Table(&s.gdt))?;
        writeln!(f, "   idt {}", Table(&s.idt))
    }
}

struct Segment<'a>(&'a kvm_segment);

impl fmt::Display for Segment<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Segment(s) = self;
        if s.unusable != 0 || s.present == 0 {
            return write!(f, "{:04x} (not usable)", s.selector);
        }
        let width = match (s.l, s.db) {
            (0, 0) => 16,
            (0, _) => 32,
            _ => 64,
        };
        write!(
            f,
            "{:04x} base {:016x} limit {:08x} type {:x} ring {} {width} bit",
            s.selector, s.base, s.limit, s.type_, s.dpl
        )
    }
}

struct Table<'a>(&'a kvm_dtable);

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "base {:016x} limit {:04x}", self.0.base, self.0.limit)
    }
}

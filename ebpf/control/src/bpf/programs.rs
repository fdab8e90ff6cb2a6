//! Small programs, written as the kernel's instructions (Documentation/bpf/standardization).

use std::{io, os::fd::OwnedFd};

use aya_obj::generated::{bpf_cmd, bpf_prog_type};

use super::{call, fill_name, owned, zeroed};

/// Type of the programs at TC.
pub(crate) const SCHED_CLS: u32 = bpf_prog_type::BPF_PROG_TYPE_SCHED_CLS as u32;

/// Encodes an instruction: operation, destination register (the source is in the upper four bits),
/// immediate.
pub(crate) const fn instruction(code: u8, registers: u8, immediate: i32) -> u64 {
    code as u64 | (registers as u64) << 8 | (immediate as u32 as u64) << 32
}

pub(crate) const fn set_register(register: u8, value: i32) -> u64 {
    instruction(0xb7, register, value)
}

/// Calls a helper by its number, `bpf_func_id`.
pub(crate) const fn call_helper(number: i32) -> u64 {
    instruction(0x85, 0, number)
}

pub(crate) const EXIT: u64 = instruction(0x95, 0, 0);

/// Loads a program that has no BTF. Its name is cut to 15 bytes.
pub(crate) fn prog_load(
    name: &str,
    prog_type: u32,
    expected_attach_type: u32,
    instructions: &[u64],
) -> io::Result<OwnedFd> {
    let mut attr = zeroed();
    attr.__bindgen_anon_3.prog_type = prog_type;
    attr.__bindgen_anon_3.expected_attach_type = expected_attach_type;
    attr.__bindgen_anon_3.insns = instructions.as_ptr() as u64;
    attr.__bindgen_anon_3.insn_cnt = instructions.len() as u32;
    attr.__bindgen_anon_3.license = c"GPL".as_ptr() as u64;
    // SAFETY: the struct written above; its name is plain bytes.
    fill_name(unsafe { &mut attr.__bindgen_anon_3.prog_name }, name);
    call(bpf_cmd::BPF_PROG_LOAD, &mut attr).map(owned)
}

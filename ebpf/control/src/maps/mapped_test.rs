use std::{
    fs::{self, File},
    os::fd::AsFd,
};

use super::{Mapped, Protection};

/// The flags that the kernel shows of the mapping at this address.
fn flags_of(address: usize) -> String {
    let all = fs::read_to_string("/proc/self/smaps").unwrap();
    let mapping = all
        .lines()
        .skip_while(|line| !line.starts_with(&format!("{address:x}-")))
        .find_map(|line| line.strip_prefix("VmFlags:"));
    mapping.unwrap().to_owned()
}

#[test]
fn a_mapped_array_is_not_copied_by_fork() {
    let file: File = tempfile::tempfile().unwrap();
    file.set_len(4096).unwrap();
    let mapped = Mapped::<u64>::new(file.as_fd(), 512, Protection::Read).unwrap();
    let flags = flags_of(mapped.at(0).unwrap() as usize);
    // VM_DONTCOPY.
    assert!(flags.split_whitespace().any(|flag| flag == "dc"), "{flags}");
    // SAFETY: the address above is not used again.
    unsafe { mapped.unmap() };
}

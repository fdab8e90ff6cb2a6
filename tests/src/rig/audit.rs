//! System calls that a seccomp filter killed, as reported by the audit of a machine's kernel on its
//! console (`audit=1`; record type 1326, `AUDIT_SECCOMP`).

use std::{fs, path::Path};

/// Where Debian's linux-libc-dev has the numbers of x86-64, and where others have them.
const HEADERS: [&str; 2] = [
    "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
    "/usr/include/asm/unistd_64.h",
];

/// Each: the thread that made it, the call's name and number, and where it was made.
pub fn forbidden_calls(console: &str) -> Vec<String> {
    let records = console.lines().filter(|line| line.contains("type=1326 "));
    records.map(told).collect()
}

fn told(record: &str) -> String {
    let field = |name: &str| {
        let words = record.split_whitespace();
        let mut values = words.filter_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        values.next().unwrap_or("?").trim_matches('"')
    };
    let number = field("syscall");
    let name = number.parse().ok().and_then(name);
    let name = name.unwrap_or_else(|| "no call of x86-64's".into());
    let (thread, pid, ip) = (field("comm"), field("pid"), field("ip"));
    format!("{thread} (process {pid}): {name}, number {number}, at {ip}")
}

/// Returns the name of a system call, if this machine has the kernel's headers.
fn name(number: u64) -> Option<String> {
    let header = HEADERS.iter().find(|path| Path::new(path).is_file())?;
    let text = fs::read_to_string(header).ok()?;
    let numbers = text
        .lines()
        .filter_map(|line| line.strip_prefix("#define __NR_")?.split_once(' '));
    let mut names = numbers.filter(|(_, value)| value.trim() == number.to_string());
    names.next().map(|(name, _)| name.to_owned())
}

#[cfg(test)]
#[path = "audit_test.rs"]
mod tests;

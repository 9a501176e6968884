//! Random reads, writes, truncations, extensions, holes, closes and reopens of one file, compared with the same octets in memory: what
//! the program `fsx` does to local file systems.

use std::collections::VecDeque;
use std::fmt;

use super::{Files, assert_fails};
use crate::rig::{Seeded, octets};

/// Operations that are told when something is wrong.
const TOLD: usize = 40;

/// What is done.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub seed: u64,
    pub operations: usize,
    /// Of the file at most.
    pub len_max: u64,
    /// Of one operation at most.
    pub count_max: u64,
}

impl Plan {
    pub const fn new(seed: u64, operations: usize) -> Self {
        Self { seed, operations, len_max: 256 << 10, count_max: 64 << 10 }
    }
}

#[derive(Clone, Copy, Debug)]
enum Operation {
    Write {
        at: u64,
        count: u64,
    },
    /// Behind the end: a hole.
    Skip {
        at: u64,
        count: u64,
    },
    Read {
        at: u64,
        count: u64,
    },
    Shorten {
        len: u64,
    },
    Lengthen {
        len: u64,
    },
    Commit,
    Forget,
    Reopen,
    Stat,
    Rename,
    /// Removed and made anew.
    Replace,
}

struct Log {
    plan: Plan,
    path: String,
    number: usize,
    done: VecDeque<(usize, Operation)>,
    /// All that changed octets since the file was made.
    changes: Vec<(usize, Operation)>,
}

impl Log {
    fn note(&mut self, operation: Operation) {
        if self.done.len() == TOLD {
            self.done.pop_front();
        }
        self.done.push_back((self.number, operation));
        match operation {
            Operation::Replace => self.changes.clear(),
            Operation::Write { .. }
            | Operation::Skip { .. }
            | Operation::Shorten { .. }
            | Operation::Lengthen { .. } => {
                self.changes.push((self.number, operation));
            }
            _ => {}
        }
    }

    /// Those that touched the octet at `at`.
    fn of(&self, at: u64) -> Vec<String> {
        let touches = |operation: &Operation| match *operation {
            Operation::Write { at: from, count } | Operation::Skip { at: from, count } => {
                (from..from + count).contains(&at)
            }
            Operation::Shorten { len } => len <= at,
            Operation::Lengthen { len } => len > at,
            _ => false,
        };
        let changes: Vec<_> = self.changes.iter().filter(|(_, operation)| touches(operation)).collect();
        changes.iter().rev().take(TOLD).rev().map(|(number, operation)| format!("{number}: {operation:?}")).collect()
    }

    fn fail(&self, what: impl fmt::Display, at: Option<u64>) -> ! {
        eprintln!("the last operations on {}:", self.path);
        for (number, operation) in &self.done {
            eprintln!("  {number}: {operation:?}");
        }
        if let Some(at) = at {
            eprintln!("of octet {at}:");
            for line in self.of(at) {
                eprintln!("  {line}");
            }
        }
        panic!("{}, operation {} of seed {}: {what}", self.path, self.number, self.plan.seed);
    }

    /// Says where the first difference is.
    fn compare(&self, at: u64, found: &[u8], expected: &[u8]) {
        if found.len() != expected.len() {
            let what = format!("{} octets from {at} on, {} expected", found.len(), expected.len());
            self.fail(what, Some(at + found.len().min(expected.len()) as u64));
        }
        if let Some(index) = found.iter().zip(expected).position(|(found, expected)| found != expected) {
            let count = found.iter().zip(expected).filter(|(found, expected)| found != expected).count();
            let what = format!(
                "of {} octets from {at} on {count} are wrong, the first at {}: {:02x?}, not {:02x?}",
                found.len(),
                at + index as u64,
                &found[index..found.len().min(index + 16)],
                &expected[index..expected.len().min(index + 16)]
            );
            self.fail(what, Some(at + index as u64));
        }
    }
}

/// Does it, and removes the file.
///
/// # Panics
/// When something is not as in memory; the operations before are told.
pub fn scramble<F: Files>(files: &F, path: &str, plan: &Plan) {
    let mut random = Seeded::new(plan.seed);
    let mut model: Vec<u8> = Vec::new();
    let names = [path.to_owned(), format!("{path}.renamed")];
    let mut named = 0;
    let mut log = Log { plan: *plan, path: path.to_owned(), number: 0, done: VecDeque::new(), changes: Vec::new() };
    let mut file = files.create_new(path).unwrap_or_else(|error| panic!("{path}: {error}"));
    for number in 1..=plan.operations {
        log.number = number;
        let len = model.len() as u64;
        let operation = choose(&mut random, plan, len);
        log.note(operation);
        let done = match operation {
            Operation::Write { at, count } | Operation::Skip { at, count } => {
                // Each write has octets of its own: what is stale is found out.
                let written = octets(plan.seed << 32 | number as u64, count as usize);
                let end = (at + count) as usize;
                if model.len() < end {
                    model.resize(end, 0);
                }
                model[at as usize..end].copy_from_slice(&written);
                files.write_at(&file, at, &written)
            }
            Operation::Read { at, count } => {
                let mut into = vec![0xEE; count as usize];
                files.read_at(&file, at, &mut into).map(|found| {
                    let expected = &model[model.len().min(at as usize)..model.len().min((at + count) as usize)];
                    log.compare(at, &into[..found], expected);
                })
            }
            Operation::Shorten { len } | Operation::Lengthen { len } => {
                model.resize(len as usize, 0);
                files.set_len(&file, len)
            }
            Operation::Commit => files.commit(&file),
            Operation::Forget => files.commit(&file).and_then(|()| files.forget(&file)),
            Operation::Reopen => {
                let opened = files.close(file).and_then(|()| files.open(&names[named]));
                file = opened.unwrap_or_else(|error| log.fail(error, None));
                Ok(())
            }
            Operation::Stat => files.stat(&names[named]).and_then(|stat| {
                let len = files.len(&file)?;
                if (stat.len, len) != (model.len() as u64, model.len() as u64) {
                    log.fail(format!("it is {} and {len} octets long, not {}", stat.len, model.len()), None);
                }
                Ok(())
            }),
            Operation::Rename => {
                let (from, to) = (&names[named], &names[1 - named]);
                named = 1 - named;
                // The open file stays what it is.
                files.rename(from, to)
            }
            Operation::Replace => {
                model.clear();
                let removed = files.close(file).and_then(|()| files.remove(&names[named]));
                let made = removed.and_then(|()| {
                    assert_fails(files.stat(&names[named]), &[libc::ENOENT], "it was removed");
                    files.create_new(&names[named])
                });
                file = made.unwrap_or_else(|error| log.fail(error, None));
                Ok(())
            }
        };
        if let Err(error) = done {
            log.fail(error, None);
        }
    }
    let closed = files.close(file);
    if let Err(error) = closed {
        log.fail(error, None);
    }
    let client = files.another();
    let file = client.open(&names[named]).unwrap_or_else(|error| log.fail(error, None));
    client.forget(&file).unwrap();
    let mut all = vec![0; plan.len_max as usize + 1];
    let found = client.read_at(&file, 0, &mut all).unwrap_or_else(|error| log.fail(error, None));
    log.compare(0, &all[..found], &model);
    drop(file);
    files.remove(&names[named]).unwrap_or_else(|error| log.fail(error, None));
}

fn choose(random: &mut Seeded, plan: &Plan, len: u64) -> Operation {
    let count_of = |random: &mut Seeded| match random.below(4) {
        0 => 1 + random.below(16),
        1 => 1 + random.below(plan.count_max.min(5000)),
        _ => 1 + random.below(plan.count_max),
    };
    match random.below(100) {
        0..32 => {
            let at = random.below(len + 1).min(plan.len_max - 1);
            Operation::Write { at, count: count_of(random).min(plan.len_max - at) }
        }
        32..40 if len < plan.len_max => {
            let at = len + random.below(plan.len_max - len);
            Operation::Skip { at, count: count_of(random).min(plan.len_max - at) }
        }
        32..62 => Operation::Read { at: random.below(len + 10), count: count_of(random) },
        // All of it, so that nothing wrong lives for long.
        62..72 => Operation::Read { at: 0, count: plan.len_max },
        72..76 => Operation::Shorten { len: random.below(len + 1) },
        76..80 => Operation::Lengthen { len: len + random.below(plan.len_max - len + 1) },
        80..84 => Operation::Commit,
        84..90 => Operation::Forget,
        90..94 => Operation::Reopen,
        94..98 => Operation::Stat,
        98 => Operation::Rename,
        _ if random.one_in(4) => Operation::Replace,
        _ => Operation::Stat,
    }
}

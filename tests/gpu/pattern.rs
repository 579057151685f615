//! What the programs compute on the GPU, and the same in Rust: each number of their buffers takes a step of a linear
//! congruential generator.

use crate::{Outcome, Test};

/// The kernels that do it there.
pub(crate) const KERNELS: &str = include_str!("kernels.ptx");
/// How many buffers a program has.
pub(crate) const BUFFERS: u32 = 4;
/// How many numbers a buffer has: 64 MiB of them.
pub(crate) const LENGTH: u32 = 16 << 20;
/// What the buffers take on the GPU.
pub(crate) const MIB: u64 = (BUFFERS as u64 * LENGTH as u64 * 4) >> 20;

const MULTIPLIER: u32 = 1_664_525;
const INCREMENT: u32 = 1_013_904_223;

/// A number before the first step. No two buffers and no two seeds begin alike.
pub(crate) fn initial(seed: u32, buffer: u32, at: u32) -> u32 {
    let place = buffer.wrapping_mul(LENGTH).wrapping_add(at);
    let mixed = seed
        .wrapping_mul(0x85eb_ca6b)
        .wrapping_add(place)
        .wrapping_mul(0x9e37_79b1);
    mixed ^ (mixed >> 15)
}

/// A checksum that goes on with these numbers. Which stands where matters.
pub(crate) fn checksum(sum: u64, number: u32) -> u64 {
    sum.wrapping_mul(0x5851_f42d_4c95_7f2d)
        .wrapping_add(u64::from(number))
}

/// The checksum of all buffers of a program after so many steps.
pub(crate) fn expected(seed: u32, steps: u32) -> u64 {
    let (multiplier, increment) = leap(steps);
    let mut sum = 0;
    for buffer in 0..BUFFERS {
        for at in 0..LENGTH {
            let number = initial(seed, buffer, at);
            sum = checksum(sum, number.wrapping_mul(multiplier).wrapping_add(increment));
        }
    }
    sum
}

fn step(number: u32) -> u32 {
    number.wrapping_mul(MULTIPLIER).wrapping_add(INCREMENT)
}

/// So many steps in one.
fn leap(steps: u32) -> (u32, u32) {
    let mut leap: (u32, u32) = (1, 0);
    for _ in 0..steps {
        leap = (leap.0.wrapping_mul(MULTIPLIER), step(leap.1));
    }
    leap
}

pub(crate) const TESTS: &[Test] = &[
    ("a_leap_is_as_many_steps", a_leap_is_as_many_steps),
    (
        "the_kernel_takes_the_same_steps",
        the_kernel_takes_the_same_steps,
    ),
    (
        "what_differs_has_another_checksum",
        what_differs_has_another_checksum,
    ),
];

fn a_leap_is_as_many_steps() -> Outcome {
    for at in [0, 1, LENGTH - 1] {
        let mut number = initial(7, 3, at);
        for steps in 0..20 {
            let (multiplier, increment) = leap(steps);
            let leapt = initial(7, 3, at)
                .wrapping_mul(multiplier)
                .wrapping_add(increment);
            if leapt != number {
                return Err(format!("{steps} steps lead to {number}, a leap to {leapt}").into());
            }
            number = step(number);
        }
    }
    Ok(())
}

fn the_kernel_takes_the_same_steps() -> Outcome {
    let line = format!("mad.lo.u32 %value, %value, {MULTIPLIER}, {INCREMENT};");
    for needed in [&line, ".visible .entry step(", ".visible .entry spin("] {
        if KERNELS.matches(needed).count() != 1 {
            return Err(format!("the kernels have not one {needed:?}").into());
        }
    }
    Ok(())
}

fn what_differs_has_another_checksum() -> Outcome {
    let of = |numbers: &[u32]| numbers.iter().fold(0, |sum, number| checksum(sum, *number));
    let right = of(&[1, 2, 3, 0]);
    let wrong: [&[u32]; 5] = [
        &[2, 1, 3, 0],
        &[1, 2, 3, 1],
        &[0, 2, 3, 0],
        &[3, 0, 1, 2],
        &[0, 0, 0, 0],
    ];
    let is_hidden = wrong.iter().any(|wrong| of(wrong) == right);
    let first = expected(1, 1);
    match !is_hidden
        && first == expected(1, 1)
        && first != expected(1, 2)
        && first != expected(2, 1)
    {
        true => Ok(()),
        false => Err("what differs has one checksum".into()),
    }
}
